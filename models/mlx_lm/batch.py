"""Decode steps of several sequences in one pass through mlx-lm's classes.

Every sequence keeps its own caches. In a shared pass each layer appends to them, and attends to a padded, masked copy
of all of them. A pass is shared only if copying one layer's K/V at a time moves fewer bytes than reading the weights
once per sequence. mlx-lm's own batches copy when a sequence joins or ends, and pad K/V to the longest.

Classes may mishandle masks and positions that differ by sequence. Before a model's first shared pass, `agrees` compares
one with passes alone.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from headrace.runtime.metrics.cost import LayerKV

_LENGTHS = (12, 2)  # entries of the compared sequences: most of the shorter row is padding
_TOLERANCE = {mx.float32: 1e-3}  # of the largest logit
_HALF_TOLERANCE = 0.05  # the same for half-precision types


class BatchedPart:
    """One layer's caches of N sequences, for one token each.

    parts: mlx-lm's plain, quantized or rotating caches. hides: shared by the layers; not empty if a mask hides entries
    of a sequence from its own token.
    """

    def __init__(self, parts: Sequence[Any], hides: list[bool]) -> None:
        self._parts = parts
        self._ends = [min(part.offset + 1, getattr(part, "max_size", part.offset + 1)) for part in parts]
        self.offset = mx.array([part.offset for part in parts])  # (N,)
        self.masked = False
        self._hides = hides
        if hasattr(parts[0], "bits"):  # mlx-lm's attention tests for the attribute
            self.bits, self.group_size = parts[0].bits, parts[0].group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """keys, values (N, Hkv, 1, D) -> both (N, Hkv, longest, D), or the arrays of a quantized cache."""
        for row, part in enumerate(self._parts):
            part.update_and_fetch(keys[row : row + 1], values[row : row + 1])
        self.offset = self.offset + 1
        longest = max(self._ends)
        held = [(part.keys, part.values) for part in self._parts]
        together: tuple[Any, Any] = tree_map(lambda *rows: mx.concatenate([_cut(row, longest) for row in rows]), *held)
        return together

    def own_entries(self) -> list[tuple[mx.array, mx.array]] | None:
        """Return each sequence's keys and values (1, Hkv, S, D); None if its token does not see all of them."""
        if self._hides:
            return None
        return [
            (part.keys[:, :, :end], part.values[:, :, :end]) for part, end in zip(self._parts, self._ends, strict=True)
        ]

    def make_mask(self, tokens: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return the mask (N, 1, 1, longest) of visible entries, or None if all are."""
        self.masked = True
        assert tokens == 1
        masks = [part.make_mask(1, window_size=window_size, return_array=False) for part in self._parts]
        if not all(mask is None for mask in masks):
            self._hides.append(True)
        longest = max(self._ends)
        if not return_array and all(mask is None for mask in masks) and min(self._ends) == longest:
            return None
        rows = []
        for mask, end in zip(masks, self._ends, strict=True):
            seen = mx.ones((end,), mx.bool_) if mask is None else mask.reshape(-1)
            rows.append(mx.pad(seen, (0, longest - end)))
        return mx.stack(rows)[:, None, None]


def _cut(rows: mx.array, length: int) -> mx.array:
    """(1, Hkv, capacity, D) -> (1, Hkv, length, D). Rows behind a sequence's entries are masked."""
    lacking = length - rows.shape[2]
    return rows[:, :, :length] if lacking <= 0 else mx.pad(rows, [(0, 0), (0, 0), (0, lacking), (0, 0)])


def batch_parts(sequences: Sequence[Sequence[Any]]) -> list[BatchedPart]:
    """Return the parts of several sequences, layer by layer."""
    hides: list[bool] = []
    return [BatchedPart(parts, hides) for parts in zip(*sequences, strict=True)]


def can_batch(model: Any, make_parts: Callable[[], list[Any]]) -> bool:
    """Return whether shapes allow a step of several sequences. Evaluates nothing."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

    sequences = [make_parts() for _ in _LENGTHS]
    kinds = (KVCache, QuantizedKVCache, RotatingKVCache)
    if not all(type(part) in kinds and not getattr(part, "keep", 0) for part in sequences[0]):
        return False
    try:
        for parts, length in zip(sequences, _LENGTHS, strict=True):
            model(mx.zeros((1, length), mx.int32), cache=parts)
        batched = batch_parts(sequences)
        logits = model(mx.zeros((len(sequences), 1), mx.int32), cache=batched)
    except Exception:  # classes that assume one position for all sequences raise anything
        return False
    return logits.shape[:2] == (len(sequences), 1) and any(part.masked for part in batched)


def agrees(model: Any, make_parts: Callable[[], list[Any]]) -> bool:
    """Return whether a shared step of two lengths gives the logits of steps alone. Reads the weights."""
    sequences = [make_parts() for _ in _LENGTHS]
    for parts, length in zip(sequences, _LENGTHS, strict=True):
        model(mx.arange(1, length + 1)[None], cache=parts)
        mx.eval([part.state for part in parts])
    twins = deepcopy(sequences)
    token = mx.array([[1]])
    expected = mx.concatenate([model(token, cache=parts)[:, -1] for parts in twins])  # (2, V)
    together = model(mx.concatenate([token] * len(_LENGTHS)), cache=batch_parts(sequences))[:, -1]
    apart = mx.abs(expected - together).astype(mx.float32).max() / mx.abs(expected).astype(mx.float32).max()
    return bool((apart <= _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)).item())


def worth_batching(lengths: Sequence[int], weight_bytes: int, kv: Sequence[LayerKV]) -> bool:
    """Return whether copying the K/V of so many entries moves fewer bytes than weights read once per sequence."""
    longest = max(lengths) + 1
    row = sum(layer.nbytes(longest) for layer in kv)
    return 2 * len(lengths) * row <= (len(lengths) - 1) * weight_bytes
