"""mlx-lm's per-layer caches as one cache of a sequence.

Some parts drop entries: recurrent state has none, a rotating or chunked cache drops its front. Their state is saved
with every mark; other parts are trimmed. A part's attributes and content tell them apart, not its class.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from headrace.models.network.cache_marks import Mark, Marks
from headrace.models.network.touched import leaves
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.cache import CacheLengths
from headrace.runtime.metrics.cost import LayerKV

_ROOM = ("max_size", "chunk_size")  # attributes of parts with a bound on entries


class MlxLmCache(CacheLengths):
    """The caches of `make_prompt_cache`, with marks if a part drops entries."""

    def __init__(self, parts: list[Any], limit: int, kv: Sequence[LayerKV]) -> None:
        super().__init__(limit)
        self.parts = parts
        self.needs_marks = any(_drops(part) for part in leaves(parts))
        self._before: tuple[int, list[Any]] | None = None  # length and recurrent state before the newest pass
        self._marks = Marks()
        self._kv = kv

    @property
    def rolls_back(self) -> bool:
        """True if draft tokens can be verified: parts that drop entries have recurrent state, and no window."""
        return not any(hasattr(part, name) for part in leaves(self.parts) for name in _ROOM)

    def hold(self) -> None:
        """Keep the recurrent state, which is replaced and never written to, for a rollback of the next pass."""
        states = [tree_map(lambda leaf: leaf, vars(part)) if _drops(part) else None for part in leaves(self.parts)]
        self._before = (self.length, states)

    def rollback(self) -> None:
        if self.length > self.committed and self._before is not None and self.needs_marks:
            length, states = self._before
            for part, state in zip(leaves(self.parts), states, strict=True):
                if state is None:
                    part.trim(self.length - length)
                else:
                    vars(part).update(state)
            self.length = self.committed = length
            self._before = None
            return
        self._go_back(self.committed)
        super().rollback()

    def trim(self, length: int) -> None:
        if 0 <= length <= self.committed:
            self._go_back(length)
        super().trim(length)

    def mark(self) -> None:
        newest = self._marks.at_most(self.committed)
        if not self.needs_marks or (newest and newest.length == self.committed):
            return
        self.add_mark(self.committed, [_copy(vars(part)) if _drops(part) else None for part in leaves(self.parts)])

    def add_mark(self, length: int, state: list[Any]) -> None:
        """Make `length` reachable by the state of the parts that drop entries, None for others."""
        arrays = _arrays(state)
        mx.eval(arrays)  # a saved state must not keep its inputs alive
        self._marks.add(Mark(length, state, sum(array.nbytes for array in arrays)))

    def mark_before(self, length: int) -> Mark | None:
        """Return the longest mark of less than `length` entries."""
        return self._marks.at_most(length - 1)

    def reachable(self, length: int) -> int:
        if length == self.length or all(_can_trim(part) for part in leaves(self.parts)):
            return length
        mark = self._marks.at_most(length)
        return 0 if mark is None else mark.length

    def duplicate(self) -> "MlxLmCache":
        """Return a cache with the same entries and marks. Arrays are shared until one of the two writes to them."""
        twin = copy(self)
        twin.parts = deepcopy(self.parts)  # of an array, another handle of the same memory
        twin._marks = Marks(self._marks)
        return twin

    def restart(self, parts: list[Any]) -> None:
        """Replace all parts by empty ones, at the same length; the network appends the entries anew."""
        self.parts = parts
        self._marks = Marks()

    @property
    def committed_bytes(self) -> int:
        return sum(layer.nbytes(self.committed) for layer in self._kv)

    @property
    def allocated_bytes(self) -> int:
        return sum(int(part.nbytes) for part in self.parts if not part.empty()) + self._marks.nbytes

    @property
    def arrays(self) -> list[mx.array]:
        return _arrays([part.state for part in self.parts if not part.empty()])

    def _go_back(self, length: int) -> None:
        """Restore the first `length` entries. Raises EngineError, and changes nothing, if they are not reachable."""
        surplus = self.length - length
        if not surplus:
            return
        if self.reachable(length) != length:
            raise EngineError("the cache has dropped what it would need to go back")
        mark = self._marks.at_most(length)
        saved = mark.state if mark and mark.length == length else [None] * len(leaves(self.parts))
        for part, state in zip(leaves(self.parts), saved, strict=True):
            if _can_trim(part):
                part.trim(surplus)
            else:
                vars(part).update(_copy(state))
        self._marks.drop_beyond(length)


def _drops(part: Any) -> bool:
    """Return whether a part drops entries sooner or later: recurrent state, or a bound on entries."""
    return not part.is_trimmable() or any(hasattr(part, name) for name in _ROOM)


def _can_trim(part: Any) -> bool:
    """Return whether a part still has every entry, and can drop the last ones."""
    keys = getattr(part, "keys", None)
    held = part.offset - int(keys.shape[2]) if isinstance(keys, mx.array) else 0
    return bool(part.is_trimmable()) and max(int(getattr(part, "start_position", 0)), held) <= 0


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy, since caches write in place; views do not keep larger buffers alive."""
    copied: dict[str, Any] = tree_map(lambda leaf: mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf, state)
    return copied


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]
