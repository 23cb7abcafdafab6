"""mlx-lm's per-layer caches as one cache of the engine's.

Some of them forget: recurrent state has no entries, a rotating or chunked cache drops its front. What such a part holds
is saved with every mark; the others are trimmed. Which ones forget is seen from what they say of themselves and hold,
not from their class.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from headrace.models.network.cache_marks import Mark, Marks
from headrace.models.network.mlx_lm_costs import leaves
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.cache import Lengths
from headrace.runtime.metrics.cost import LayerKV
from headrace.runtime.ops import Phase

_ROOM = ("max_size", "chunk_size")  # what parts with room for so many entries call it


class MlxLmCache(Lengths):
    """What `make_prompt_cache` gave for a model, with marks where a part of it forgets."""

    def __init__(self, parts: list[Any], limit: int, kv: Sequence[LayerKV]) -> None:
        super().__init__(limit)
        self.parts = parts
        self.said: list[mx.array] = []  # tokens (1, T) in the order they came: kept for LongRoPE only
        self.long = False  # by which of its factors the keys are turned
        self.needs_marks = any(_forgets(part) for part in leaves(parts))
        self._marks = Marks()
        self._kv = kv

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """mlx-lm's caches grow by themselves."""

    def rollback(self) -> None:
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
        state = [_copy(vars(part)) if _forgets(part) else None for part in leaves(self.parts)]
        arrays = _arrays(state)
        mx.eval(arrays)  # what is saved should not hold on to what it was computed from
        self._marks.add(Mark(self.committed, state, sum(array.nbytes for array in arrays)))

    def reachable(self, length: int) -> int:
        if length == self.length or all(_can_trim(part) for part in leaves(self.parts)):
            return length
        mark = self._marks.at_most(length)
        return 0 if mark is None else mark.length

    def start_again(self, parts: list[Any]) -> None:
        """Empty parts in place of those there are, at the same length: the entries are going to be fed once more."""
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
        """Hold the first `length` entries again. Raises EngineError where that is out of reach, and changes nothing."""
        surplus = self.length - length
        if not surplus:
            return
        if self.reachable(length) != length:
            raise EngineError("the cache has forgotten what it would have to go back to")
        mark = self._marks.at_most(length)
        saved = mark.state if mark and mark.length == length else [None] * len(leaves(self.parts))
        for part, state in zip(leaves(self.parts), saved, strict=True):
            if _can_trim(part):
                part.trim(surplus)
            else:
                vars(part).update(_copy(state))
        self._marks.drop_beyond(length)


def _forgets(part: Any) -> bool:
    """Whether a part drops, sooner or later, what it was given: it holds a state, or has room for so many entries."""
    return not part.is_trimmable() or any(hasattr(part, name) for name in _ROOM)


def _can_trim(part: Any) -> bool:
    """Whether a part still holds every entry it was given and says that it can drop the last ones."""
    keys = getattr(part, "keys", None)
    held = part.offset - int(keys.shape[2]) if isinstance(keys, mx.array) else 0
    return bool(part.is_trimmable()) and max(int(getattr(part, "start_position", 0)), held) <= 0


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """The same values in containers and arrays of its own: caches write into theirs. No larger buffer is held on to."""
    copied: dict[str, Any] = tree_map(lambda leaf: mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf, state)
    return copied


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]
