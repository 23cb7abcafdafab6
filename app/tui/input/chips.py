"""Attached files: name and tokens of each, in a line above the prompt.

`ChatView.sync` shows those of the unsent message. Tokens are counted by the engine, so they come a moment later.

Guard: tests/tui/input/test_chips.py.
"""

from textual.content import Content
from textual.widgets import Static

from headrace.app.chat.unsent_message import UnsentMessage
from headrace.app.output.sanitise import sanitise

_NO_BREAK = "\u00a0"  # a space at which no line is broken
_SHOWN = 4  # files by name; of more, how many


class Chips(Static):
    """Hidden while there are none."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._shown: object = None

    def show(self, unsent: UnsentMessage | None) -> None:
        """Draw the attachments if they changed."""
        names: list[str] = []
        tokens: list[int | None] = []
        problem = ""
        if unsent is not None:
            names = [file.name for file in unsent.files]
            tokens = list(unsent.file_tokens)
            problem = unsent.problem
        if (names, tokens, problem) == self._shown:
            return
        self._shown = names, tokens, problem
        self.display = bool(names or problem)
        if problem:
            self.update(Content.styled(f"✗ {sanitise(problem)}", "$text-error"))
            return
        chips = [_chip(name, count) for name, count in zip(names, tokens, strict=True)][:_SHOWN]
        if len(names) > _SHOWN:
            text = f"and {len(names) - _SHOWN} more"
            counts = [count for count in tokens if count is not None]
            if len(counts) == len(tokens):
                text += f", {sum(counts):,} tokens in all"
            chips.append(Content.styled(text, "$quiet"))
        self.update(Content("  ").join(chips))


def _chip(name: str, tokens: int | None) -> Content:
    """Return a file's name and size, which are not broken over lines. tokens: None until they are counted."""
    size = " … " if tokens is None else f" {tokens:,} tokens "
    return Content.assemble(
        (f" {sanitise(name)}".replace(" ", _NO_BREAK), "bold $text-accent on $surface"),
        (size.replace(" ", _NO_BREAK), "$quiet on $surface"),
    )
