"""A session's tree of messages as lines, the way `git log --graph` draws one. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.app.sessions.records import Message


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A message and where it stands: `depth` forks lie above it, `lead` draws how it hangs on them."""

    message: Message
    depth: int
    lead: str
    shown: bool  # whether it is on the branch that shows


def tree_lines(messages: Sequence[Message], shown: Collection[int]) -> list[TreeLine]:
    """Every message once, parents before children, the oldest branch first.

    What follows a message without an alternative stands below it, at the same depth; each of several begins a branch
    of its own. shown: ids of the messages on the branch that shows.
    """
    children: dict[int | None, list[Message]] = {}
    for message in messages:
        children.setdefault(message.parent_id, []).append(message)
    lines: list[TreeLine] = []
    waiting: list[tuple[Message, int, str, str]] = []  # message, depth, lead of its line, lead of those below

    def hang(parent: int | None, depth: int, lead: str) -> None:
        below = children.get(parent, [])
        if len(below) == 1:
            waiting.append((below[0], depth, lead, lead))
            return
        for place, message in reversed(list(enumerate(below))):
            last = place == len(below) - 1
            waiting.append((message, depth + 1, lead + ("└ " if last else "├ "), lead + ("  " if last else "│ ")))

    hang(None, 0, "")
    while waiting:
        message, depth, lead, lead_below = waiting.pop()
        lines.append(TreeLine(message, depth, lead, message.id in shown))
        hang(message.id, depth, lead_below)
    return lines
