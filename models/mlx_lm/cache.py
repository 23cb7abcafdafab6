"""mlx-lm's per-layer caches as one cache of a sequence.

Some parts drop entries: recurrent state has none, a rotating or chunked cache drops its front. Their state is saved
with every mark; other parts are trimmed. A part's attributes and content tell them apart, not its class.

tests/models/mlx_lm/test_kv.py guards caches in fewer bits. test_forgetting.py compares answers after going back with
those of a new cache, for each kind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from math import inf
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.config import environment
from headrace.runtime.errors import EngineError
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.metrics.cost import LayerKV
from headrace.runtime.ops import reference
from headrace.runtime.ops.kv_format import Coding, KVFormat

_ROOM = ("max_size", "chunk_size")  # attributes of parts with a bound on entries
MOST = 6  # marks of a cache
MOST_BYTES = 512 << 20  # of all its marks
SavedState = list[dict[str, Any] | None]
"""Attributes of each part that drops entries, None for others."""


class CachePart(Protocol):
    """The cache of a layer, of one of the classes in `mlx_lm.models.cache`. Recurrent state has no offset."""

    offset: int
    nbytes: int
    state: object

    def empty(self) -> bool: ...

    def is_trimmable(self) -> bool: ...

    def trim(self, n: int) -> int: ...


def leaves(parts: Iterable[CachePart]) -> list[CachePart]:
    """Return the caches, with composite ones (attention and recurrent state) split."""
    single: list[CachePart] = []
    for part in parts:
        if hasattr(part, "caches"):
            single += leaves(part.caches)
        else:
            single.append(part)
    return single


class Mark(Struct, frozen=True):
    """State of a cache that later entries overwrite."""

    length: int  # entries of the cache then
    state: SavedState
    nbytes: int  # of the state's arrays


class Marks:
    """At most MOST marks and MOST_BYTES, in order of length.

    They are the closer together the nearer they are to the end: most changes of a conversation are in its last turn,
    and a mark saves reading the tokens from the one before it.
    """

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
        """Return the longest mark of no more than `length` entries."""
        return next((mark for mark in reversed(self._marks) if mark.length <= length), None)

    def drop_beyond(self, length: int) -> None:
        """Forget the marks of more than `length` entries."""
        self._marks = [mark for mark in self._marks if mark.length <= length]

    def _least_wanted(self) -> Mark:
        """Return the mark whose loss costs the fewest tokens for its distance from the end; the newest if alone."""
        *others, newest = self._marks
        least_wanted = newest
        lowest = inf
        before = 0  # length of the mark before
        for mark in others:
            loss = (mark.length - before) / (newest.length - mark.length)
            if loss < lowest:
                least_wanted = mark
                lowest = loss
            before = mark.length
        return least_wanted


class MlxLmCache(KVCache):
    """The caches of `make_prompt_cache`, with marks if a part drops entries."""

    def __init__(self, parts: list[CachePart], limit: int, kv: Sequence[LayerKV]) -> None:
        super().__init__(limit)
        self.parts = parts
        self.needs_marks = any(_drops(part) for part in leaves(parts))
        self._before: tuple[int, SavedState] | None = None  # length and recurrent state before the newest pass
        self._marks = Marks()
        self._kv = kv  # of the model's layers, for `committed_bytes`

    @property
    def rolls_back(self) -> bool:
        """True if draft tokens can be verified: parts that drop entries have recurrent state, and no window."""
        return not any(hasattr(part, name) for part in leaves(self.parts) for name in _ROOM)

    def hold(self) -> None:
        """Keep the recurrent state, which is replaced and never written to, for a rollback of the next pass."""
        # New lists and dictionaries of the same arrays: a part puts its new state into the old lists.
        self._before = (self.length, self._states(lambda attributes: tree_map(lambda leaf: leaf, attributes)))

    def rollback(self) -> None:
        """Drop the entries after the committed ones, by the state that `hold` has kept, if there is one."""
        if self.length > self.committed and self._before is not None and self.needs_marks:
            # Back to before the pass, also of its committed tokens, which are fed again: no other state is left.
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
        """Make the committed length reachable later, if a part drops entries."""
        newest = self._marks.at_most(self.committed)
        if not self.needs_marks or (newest and newest.length == self.committed):
            return
        self.add_mark(self.committed, self._states(_copy))

    def _states(self, copied: Callable[[dict[str, Any]], dict[str, Any]]) -> SavedState:
        """Return the copied attributes of the parts that drop entries, None for others."""
        states: SavedState = []
        for part in leaves(self.parts):
            states.append(copied(vars(part)) if _drops(part) else None)
        return states

    def add_mark(self, length: int, state: SavedState) -> None:
        """Make `length` reachable by the state of the parts that drop entries, None for others."""
        arrays = arrays_in(state)
        mx.eval(arrays)  # a saved state must not keep its inputs alive
        self._marks.add(Mark(length, state, sum(array.nbytes for array in arrays)))

    def mark_before(self, length: int) -> Mark | None:
        """Return the longest mark of less than `length` entries."""
        return self._marks.at_most(length - 1)

    def reachable(self, length: int) -> int:
        """Return the longest length, `length` at most, that the cache can go back to."""
        if length == self.length or all(_can_trim(part) for part in leaves(self.parts)):
            return length
        mark = self._marks.at_most(length)
        if mark is None:
            return 0
        return mark.length

    def duplicate(self) -> "MlxLmCache":
        """Return a cache with the same entries and marks. Arrays are shared until one of the two writes to them."""
        twin = copy(self)
        twin.parts = deepcopy(self.parts)  # of an array, another handle of the same memory
        twin._marks = Marks(self._marks)
        return twin

    def restart(self, parts: list[CachePart]) -> None:
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
        return arrays_in([part.state for part in self.parts if not part.empty()])

    def _go_back(self, length: int) -> None:
        """Restore the first `length` entries. Raises EngineError, and changes nothing, if they are not reachable."""
        surplus = self.length - length
        if not surplus:
            return
        if self.reachable(length) != length:
            raise EngineError("the cache has dropped what it would need to go back")
        parts = leaves(self.parts)
        states: SavedState = [None] * len(parts)
        mark = self._marks.at_most(length)
        if mark is not None and mark.length == length:
            states = mark.state
        for part, state in zip(parts, states, strict=True):
            if _can_trim(part):
                part.trim(surplus)
            else:
                assert state is not None
                vars(part).update(_copy(state))
        self._marks.drop_beyond(length)


def _drops(part: CachePart) -> bool:
    """Return whether a part drops entries sooner or later: recurrent state, or a bound on entries."""
    return not part.is_trimmable() or any(hasattr(part, name) for name in _ROOM)


def _can_trim(part: CachePart) -> bool:
    """Return whether a part still has every entry, and can drop the last ones."""
    if not part.is_trimmable() or int(getattr(part, "start_position", 0)) > 0:
        return False
    keys = getattr(part, "keys", None)  # (1, Hkv, capacity, D)
    return not isinstance(keys, mx.array) or part.offset <= int(keys.shape[2])


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy, since caches write in place; views do not keep larger buffers alive."""
    copied: dict[str, Any] = tree_map(lambda leaf: mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf, state)
    return copied


def arrays_in(tree: object) -> list[mx.array]:
    """Return the arrays of nested lists and dictionaries."""
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


# --- K/V in fewer bits: mlx-lm's own quantized caches, for classes that attend to them --------------------------
#
# mlx-lm quantizes its plain caches, keys and values in as many bits each. Most classes call mlx-lm's attention, which
# reads these caches; others take the arrays apart. A trial pass, never evaluated, tells them apart. All tokens are
# quantized: mlx-lm's own generator leaves the first chunk of a prompt plain.

_BITS = {"q8": 8, "q4": 4}
"""Bits of keys and values alike, a whole number of codes in a dword."""


def make_parts(model: nn.Module, stored: KVFormat | None) -> list[CachePart]:
    """Return empty caches of a sequence, one a layer. stored: from `quantized`; None for the class's own choice."""
    parts = list(make_prompt_cache(model))
    if stored is None:
        return parts
    return [part.to_quantized(group_size=stored.keys.group, bits=stored.keys.bits) for part in parts]


def quantized(model: nn.Module, wanted: KVFormat) -> KVFormat | str:
    """Return the packed format for `wanted` that `model` can store K/V in, or the reason why it cannot."""
    if environment.exact():
        return "HEADRACE_EXACT asks for float32 throughout"
    if wanted.name not in _BITS:
        return "mlx-lm's classes run this model, whose caches have keys and values in as many bits each"
    parts = list(make_prompt_cache(model))
    if others := sorted({type(part).__name__ for part in parts if type(part) is not PlainCache}):
        return f"the model's class has caches of its own, and mlx-lm does not quantize a {others[0]}"
    _build(model, parts)
    arrays = arrays_in([(part.keys, part.values) for part in parts])
    dims = {int(array.shape[-1]) for array in arrays}
    if not all(reference.supports_packed(dim) for dim in dims):
        return f"MLX quantizes groups of 32, and this model has heads of {min(dims)}"
    stored = _in_groups(wanted, dims, scale_bytes=2 * max(array.dtype.size for array in arrays))
    packed = make_parts(model, stored)
    try:
        _build(model, packed)
    except Exception:  # classes that take arrays for granted raise anything
        return "mlx-lm's class for this model does not attend to quantized caches"
    return stored


def _in_groups(wanted: KVFormat, dims: Iterable[int], scale_bytes: int) -> KVFormat:
    """Return the format in groups that divide heads of all `dims`.

    scale_bytes: of a scale and an offset, which are as wide as K/V.
    """
    bits = _BITS[wanted.name]
    group = 32
    if bits == 8:
        group = min(reference.packed_format(wanted, dim).keys.group for dim in dims)
    coding = Coding(bits, group, scale_bytes)
    return replace(wanted, keys=coding, values=coding)


def _build(model: nn.Module, parts: list[CachePart]) -> None:
    """Build the graphs of a pass over several tokens and of a step after it, never evaluated."""
    for tokens in (2, 1):
        model(mx.zeros((1, tokens), mx.int32), cache=parts)
