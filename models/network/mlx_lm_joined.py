"""Steps of several sequences through mlx-lm's classes at once: their caches as one, for a pass of one token each.

Every sequence keeps caches of its own, with all they can (marks, coming back, fewer bits); for a pass each layer
appends to them and hands the class what they hold side by side, with a mask over what is not a sequence's. That is a
copy of one layer's K/V at a time, so a pass is shared only where that moves fewer bytes than reading the weights once
for each. mlx-lm's own batches copy when a sequence joins or ends instead, and hold K/V padded to the longest.

What a class makes of masks and positions that differ by sequence cannot be seen from outside, so a model's first
shared pass is preceded by one that is held against passes alone (`agrees`).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from headrace.runtime.metrics.cost import LayerKV
from headrace.runtime.ops import Phase

_LENGTHS = (12, 2)  # entries of the sequences that are compared: most of the shorter one's row is padding
_TOLERANCE = {mx.float32: 1e-3}  # of the largest logit, between other sums of the same; a half-precision type's below
_HALF_TOLERANCE = 0.05


class JoinedPart:
    """One layer's caches of N sequences, for one token each. `parts` are mlx-lm's plain, quantized or rotating ones."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._ends = [min(part.offset + 1, getattr(part, "max_size", part.offset + 1)) for part in parts]
        self.offset = mx.array([part.offset for part in parts])  # (N,)
        self.masked = False
        if hasattr(parts[0], "bits"):  # mlx-lm's attention asks whether there are any
            self.bits, self.group_size = parts[0].bits, parts[0].group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """keys, values (N, Hkv, 1, D) -> both (N, Hkv, longest, D), or several arrays of that form each, quantized."""
        for row, part in enumerate(self._parts):
            part.update_and_fetch(keys[row : row + 1], values[row : row + 1])
        self.offset = self.offset + 1
        longest = max(self._ends)
        held = [(part.keys, part.values) for part in self._parts]
        together: tuple[Any, Any] = tree_map(lambda *rows: mx.concatenate([_cut(row, longest) for row in rows]), *held)
        return together

    def make_mask(self, tokens: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """(N, 1, 1, longest): what each sequence's token attends to; None for everything."""
        self.masked = True
        assert tokens == 1
        own = [part.make_mask(1, window_size=window_size, return_array=False) for part in self._parts]
        longest = max(self._ends)
        if not return_array and all(mask is None for mask in own) and min(self._ends) == longest:
            return None
        rows = []
        for mask, end in zip(own, self._ends, strict=True):
            seen = mx.ones((end,), mx.bool_) if mask is None else mask.reshape(-1)
            rows.append(mx.pad(seen, (0, longest - end)))
        return mx.stack(rows)[:, None, None]


def _cut(rows: mx.array, length: int) -> mx.array:
    """(1, Hkv, capacity, D) -> (1, Hkv, length, D). Behind what a sequence holds is anything: it is masked."""
    lacking = length - rows.shape[2]
    return rows[:, :, :length] if lacking <= 0 else mx.pad(rows, [(0, 0), (0, 0), (0, lacking), (0, 0)])


class JoinedMlxLm:
    """The caches (`MlxLmCache`) of several sequences as one cache of the engine's, for a pass (1, N)."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = caches
        self.parts = join_parts([cache.parts for cache in caches])

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        """mlx-lm's caches grow by themselves."""

    def advance(self, tokens: int) -> None:
        assert tokens == len(self._caches)
        for cache in self._caches:
            cache.advance(1)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.arrays]


def join_parts(sequences: Sequence[Sequence[Any]]) -> list[JoinedPart]:
    """The parts of several sequences, layer by layer."""
    return [JoinedPart(parts) for parts in zip(*sequences, strict=True)]


def can_join(model: Any, make_parts: Callable[[], list[Any]]) -> bool:
    """Whether a step of several sequences can be built, as far as shapes tell. Evaluates nothing."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

    sequences = [make_parts() for _ in _LENGTHS]
    kinds = (KVCache, QuantizedKVCache, RotatingKVCache)
    if not all(type(part) in kinds and not getattr(part, "keep", 0) for part in sequences[0]):
        return False
    try:
        for parts, length in zip(sequences, _LENGTHS, strict=True):
            model(mx.zeros((1, length), mx.int32), cache=parts)
        joined = join_parts(sequences)
        logits = model(mx.zeros((len(sequences), 1), mx.int32), cache=joined)
    except Exception:  # whatever a class raises that takes one position for all sequences for granted
        return False
    return logits.shape[:2] == (len(sequences), 1) and any(part.masked for part in joined)


def agrees(model: Any, make_parts: Callable[[], list[Any]]) -> bool:
    """Whether steps of two sequences of different lengths say together what they say alone. Reads the weights."""
    sequences = [make_parts() for _ in _LENGTHS]
    for parts, length in zip(sequences, _LENGTHS, strict=True):
        model(mx.arange(1, length + 1)[None], cache=parts)
        mx.eval([part.state for part in parts])
    twins = deepcopy(sequences)
    token = mx.array([[1]])
    expected = mx.concatenate([model(token, cache=parts)[:, -1] for parts in twins])  # (2, V)
    together = model(mx.concatenate([token] * len(_LENGTHS)), cache=join_parts(sequences))[:, -1]
    apart = mx.abs(expected - together).astype(mx.float32).max() / mx.abs(expected).astype(mx.float32).max()
    return bool((apart <= _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)).item())


def worth_joining(lengths: Sequence[int], weight_bytes: int, kv: Sequence[LayerKV]) -> bool:
    """Whether laying K/V of so many entries side by side moves fewer bytes than weights read for each sequence do."""
    longest = max(lengths) + 1
    row = sum(layer.nbytes(longest) for layer in kv)
    return 2 * len(lengths) * row <= (len(lengths) - 1) * weight_bytes
