"""The lengths that a cache which forgets can come back to, and what it needs for that: few, and of bounded bytes.

Marks are kept the closer together the nearer they are to the end: what is changed of a conversation is mostly its last
turn, and what a mark saves is reading the tokens from the one before it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MOST = 6
MOST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """State of a cache at `length` entries that later entries overwrite."""

    length: int
    state: Any
    nbytes: int


class Marks:
    """At most MOST marks and MOST_BYTES, in order of length."""

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._marks = list(marks)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    @property
    def nbytes(self) -> int:
        return sum(mark.nbytes for mark in self._marks)

    def add(self, mark: Mark) -> None:
        """Add the longest there is. Others go where there are too many; it goes itself where it is too large alone."""
        self._marks.append(mark)
        while len(self._marks) > MOST or self.nbytes > MOST_BYTES:
            self._marks.remove(self._least_wanted())

    def at_most(self, length: int) -> Mark | None:
        """The longest mark of no more than `length` entries."""
        return next((mark for mark in reversed(self._marks) if mark.length <= length), None)

    def drop_beyond(self, length: int) -> None:
        """Forget the marks of more than `length` entries."""
        self._marks = [mark for mark in self._marks if mark.length <= length]

    def _least_wanted(self) -> Mark:
        """The one whose loss makes the least to read again, for how far it is from the end; the newest goes last."""
        newest = self._marks[-1]
        before = [0, *(mark.length for mark in self._marks)]
        candidates = list(zip(before, self._marks[:-1], strict=False))
        if not candidates:
            return newest
        return min(candidates, key=lambda pair: (pair[1].length - pair[0]) / (newest.length - pair[1].length))[1]
