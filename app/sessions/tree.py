"""A session's message tree as text lines, drawn like `git log --graph`.

/tree on the full screen draws it:

    question
    ├ first answer
    │ next question
    └ second answer

Guard: tests/tui/screens/test_tree_screen.py.
"""

from collections.abc import Collection, Sequence

from msgspec import Struct

from headrace.app.sessions.records import Message


class TreeLine(Struct, frozen=True):
    """A message."""

    message: Message
    lead: str  # the graph before it
    shown: bool  # it is on the active branch


def tree_lines(messages: Sequence[Message], shown: Collection[int]) -> list[TreeLine]:
    """Return one line per message, parents before children, the oldest branch first.

    An only child stands below its parent; each of several children begins a branch. shown: ids of the active branch.
    """
    children: dict[int | None, list[Message]] = {}
    for message in messages:
        children.setdefault(message.parent_id, []).append(message)
    lines: list[TreeLine] = []
    waiting: list[tuple[Message, str, str]] = []  # message, lead of its line, lead of those below

    def hang(parent: int | None, lead: str) -> None:
        below = children.get(parent, [])
        if len(below) == 1:
            waiting.append((below[0], lead, lead))
            return
        # A stack: the last child first, so that the first is taken from it first.
        corner, stem = "└ ", "  "  # the graph before the child, and before what is below it
        for message in reversed(below):
            waiting.append((message, lead + corner, lead + stem))
            corner, stem = "├ ", "│ "

    hang(None, "")
    while waiting:
        message, lead, lead_below = waiting.pop()
        lines.append(TreeLine(message, lead, message.id in shown))
        hang(message.id, lead_below)
    return lines
