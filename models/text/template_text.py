"""Text that remembers which of its characters a chat template wrote.

A template's own text may contain control tokens, text from outside (messages, tools) may not, and a prompt mixes both.
Literals of a template are `TemplateText`; texts from outside are plain `str`. Operations of `TemplateText` keep the
origin of each character, as MarkupSafe's `Markup` knows escaped text. An operation that is not listed here
returns a plain `str`, so that a forgotten one can lose a control token of the template but never make one from outside.

Guard: tests/models/text/test_template_text.py.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

# Values in `TemplateText.origin`: characters written by the template, and those of messages, tools and variables.
OWN = "t"
OUTSIDE = "o"

_MARK = "\uffff"  # see `insert_values`; no character of a text


class TemplateText(str):
    """A text with the origin of each character."""

    __slots__ = ("origin",)
    origin: str  # OWN or OUTSIDE for each character

    def __new__(cls, text: str, origin: str | None = None) -> "TemplateText":
        """origin: default: all characters are the template's own."""
        new = super().__new__(cls, text)
        new.origin = origin or OWN * len(new)
        return new

    def __str__(self) -> str:
        return self  # the compiled template passes every output through str()

    def __iter__(self) -> Iterator[str]:
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: SupportsIndex | slice) -> "TemplateText":
        return TemplateText(super().__getitem__(index), self.origin[index])

    # --- joined ----------------------------------------------------------------------------------------------

    def __add__(self, other: object) -> Any:
        if not isinstance(other, str):
            return NotImplemented
        return concatenate((self, other))

    def __radd__(self, other: object) -> Any:
        # Python asks the subclass first, so this also serves `plain text + template text`.
        if not isinstance(other, str):
            return NotImplemented
        return concatenate((other, self))

    def __mul__(self, times: SupportsIndex) -> "TemplateText":
        return TemplateText(super().__mul__(times), self.origin * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str]) -> str:
        joined: list[str] = []
        for part in parts:
            joined += (self, part)
        return concatenate(joined[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:  # `new` between all characters
            return super().replace(old, new, count)
        parts = self.split(old, count)
        return as_template_text(new).join(parts)

    def __mod__(self, values: object) -> str:
        if isinstance(values, (str, int, float)):
            values = (values,)
        if not isinstance(values, tuple):  # a mapping, whose texts may stand anywhere
            return super().__mod__(values)
        return insert_values(self, super().__mod__, values)

    # --- cut -------------------------------------------------------------------------------------------------

    def strip(self, chars: str | None = None) -> "TemplateText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "TemplateText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> "TemplateText":
        return self[: len(super().rstrip(chars))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), len(sep or ""), spaces=sep is None)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), len(sep or ""), spaces=sep is None)

    def _located(self, parts: Iterable[str], gap: int = 0, *, spaces: bool = False) -> list[str]:
        """Return successive parts of this text with their origins.

        parts: in order.
        gap: characters between two parts.
        spaces: white space of any length is around the parts.
        """
        located: list[str] = []
        start = 0
        for part in parts:
            if spaces:
                start = self.index(part, start)
            located.append(self[start : start + len(part)])
            start += len(part) + gap
        return located

    # --- letters in another case -----------------------------------------------------------------------------

    def capitalize(self) -> str:
        return self._changed(super().capitalize())

    def lower(self) -> str:
        return self._changed(super().lower())

    def title(self) -> str:
        return self._changed(super().title())

    def upper(self) -> str:
        return self._changed(super().upper())

    def _changed(self, text: str) -> str:
        """Return a text with other letters and the same origins.

        Letters that become several, such as a capital sharp s, only ever add characters, so an equal length means that
        each character stands in its place. The origin of a longer text is known only if all of it is one.
        """
        if len(text) == len(self):
            return TemplateText(text, self.origin)
        if OUTSIDE in self.origin:
            return text
        return TemplateText(text)


def as_template_text(text: object) -> TemplateText:
    """Return a text whose operations keep origins: plain text is from outside, other values become plain text."""
    if isinstance(text, TemplateText):
        return text
    text = str(text)  # of a value whose own `__str__` may return a `TemplateText`
    if isinstance(text, TemplateText):
        return text
    return TemplateText(text, OUTSIDE * len(text))


def concatenate(parts: Iterable[object]) -> str:
    """Return the written forms of all parts as one text, plain if all of them are."""
    texts = [str(part) for part in parts]
    text = "".join(texts)
    if not any(isinstance(part, TemplateText) for part in texts):
        return text
    return TemplateText(text, "".join(map(_origin, texts)))


def _origin(text: str) -> str:
    """Return the origin of each character of a text."""
    if isinstance(text, TemplateText):
        return text.origin
    return OUTSIDE * len(text)


def insert_values(pattern: TemplateText, write: Callable[[tuple[Any, ...]], str], values: tuple[object, ...]) -> str:
    """Return the text that `write` makes of a pattern and values, with their origins.

    It is written twice, the second time with marks around the texts from outside. All of the result is from outside
    where marks cannot show what is: a pattern from outside, values with values in them, a width, a precision.

    write: inserts the values into the pattern.
    """
    text = str.__str__(write(values))
    is_simple = all(isinstance(value, (str, int, float)) for value in values)
    if not is_simple or OUTSIDE in pattern.origin or _MARK in text:
        return text
    parts = str.__str__(write(tuple(map(_marked, values)))).split(_MARK)
    if "".join(parts) != text:
        return text
    return concatenate(part if index % 2 else TemplateText(part) for index, part in enumerate(parts))


def _marked(value: object) -> object:
    """Return a value with marks around its text, unless that is the template's own, or a number."""
    if not isinstance(value, str) or OUTSIDE not in _origin(value):
        return value
    return _MARK + str.__str__(value) + _MARK
