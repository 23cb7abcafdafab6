"""Attached files: name and tokens of each."""

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
        names = tuple(file.name for file in unsent.files) if unsent is not None else ()
        tokens = tuple(unsent.file_tokens) if unsent is not None else ()
        problem = unsent.problem if unsent is not None else ""
        if (names, tokens, problem) == self._shown:
            return
        self._shown = names, tokens, problem
        self.display = bool(names or problem)
        if problem:
            self.update(Content.styled(f"✗ {sanitise(problem)}", "$text-error"))
            return
        chips = [_chip(name, count) for name, count in zip(names, tokens, strict=True)][:_SHOWN]
        if len(names) > _SHOWN:
            counted = [count for count in tokens if count is not None]
            whole = f", {sum(counted):,} tokens in all" if len(counted) == len(tokens) else ""
            chips.append(Content.styled(f"and {len(names) - _SHOWN} more{whole}", "$quiet"))
        self.update(Content("  ").join(chips))


def _chip(name: str, tokens: int | None) -> Content:
    size = " … " if tokens is None else f" {tokens:,} tokens "
    unbroken = f" {sanitise(name)}".replace(" ", _NO_BREAK), size.replace(" ", _NO_BREAK)
    return Content.assemble((unbroken[0], "bold $text-accent on $surface"), (unbroken[1], "$quiet on $surface"))
