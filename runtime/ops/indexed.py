"""Sparse attention over latents: an indexer chooses the entries that a query attends to (DeepSeek V3.2, GLM 5).

Every token has one index key. The score of an entry is the sum over index heads of weight * relu(query . key). A query
attends to the `AttentionSpec.chosen` entries with the largest scores, the first ones of equal scores, or to all if it
sees no more.

An entry is key and value, so it is stored once: its first half as K, its second as V. So is an index key, in a layer of
its own (`KVShape.indexed`).

`SlotCache.attend` calls it for layers whose `AttentionSpec` has `chosen` entries and no `chooser`. A layer without
index keys attends to the choices of the last layer that has some, so choices are kept from layer to layer in a pass.
Guards: tests/parity/test_indexed.py (any split of a prompt) and test_mlx_lm_families.py (logits).
T = new tokens, H = query heads, D = size of an entry, I = index heads, J = size of an index key, k = chosen entries.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from headrace.runtime.ops.attention import SCORES
from headrace.runtime.ops.passes import BLOCK, Phase
from headrace.runtime.ops.weights import AttentionSpec, Projections, Weight

if TYPE_CHECKING:
    from headrace.runtime.ops import Ops

Halves = tuple[mx.array, mx.array]
"""First and second halves of all entries, (1, 1, capacity, D / 2) each. The capacity is a multiple of BLOCK."""


class Choice(NamedTuple):
    """Positions (rows, k) of the entries that some new tokens attend to."""

    rows: slice
    positions: mx.array


def attend_indexed(
    ops: "Ops",
    rows: Projections,
    entries: Halves,
    index_keys: Halves | None,
    choices: list[Choice],
    offset: int,
    spec: AttentionSpec,
    phase: Phase,
) -> mx.array:
    """Rotate, append entries and index keys, and attend causally over the chosen entries -> (1, T, H * D).

    ops: attend, multiply and rotate.
    rows: queries (1, T, H * D), entries (1, T, D), index queries (1, T, I * J), their weights (1, T, I), and index keys
        (1, T, J), of positions [offset, offset + T).
    entries, index_keys: those of the positions before, with room for T more; written in place. Without index keys, the
        layer shares the choices of an earlier one.
    choices: of the layer with an indexer before this one; replaced by those of this one, if it has one.
    offset: position of the first new token.
    spec: of the layer.
    phase: of the pass.
    """
    queries, new_entries, *of_indexer = rows
    length = queries.shape[1]
    chosen = spec.chosen
    assert chosen is not None
    most_bytes = SCORES[mx.default_device().type]
    queries = _rotated(ops, _heads(queries, spec.heads), offset, spec)  # (1, H, T, D)
    append_halves(entries, _rotated(ops, new_entries[:, None], offset, spec), offset)
    # The first rows see no more entries than may be chosen: they attend to all of them, without scores.
    seeing_all = min(length, max(0, chosen - offset))
    if index_keys is not None:
        copy_bytes = 4 * chosen * new_entries.shape[-1]  # of the entries that a row attends to
        choices[:] = _choose(ops, of_indexer, index_keys, offset, spec, seeing_all, most_bytes // copy_bytes)

    # Attend: first the rows that see all, then each of the others over its own entries, as a decode step.
    outs: list[mx.array] = []
    score_bytes = 4 * spec.heads * min(chosen, offset + length)
    for part in in_parts(0, seeing_all, most_bytes // score_bytes):
        mx.eval(outs)  # of the part before: MLX would allocate the scores and copies of all parts together
        seen = joined_halves(entries, slice(offset + part.stop))[None, None]
        mask = None if part.stop - part.start == 1 else "causal"
        outs.append(ops.attend_heads(queries[:, :, part], seen, seen, spec.scale, mask, None, phase))
    for part, positions in choices:
        mx.eval(outs)
        read = joined_halves(entries, positions)[:, None]  # (rows, 1, k, D)
        alone = queries[0, :, part].swapaxes(0, 1)[:, :, None]  # (rows, H, 1, D)
        out = ops.attend_heads(alone, read, read, spec.scale, None, None, "decode")
        outs.append(out.transpose(2, 1, 0, 3))
    out = mx.concatenate(outs, axis=2)  # (1, H, T, D)
    return out.transpose(0, 2, 1, 3).reshape(1, length, -1)


def _choose(
    ops: "Ops",
    of_indexer: Sequence[mx.array],
    index_keys: Halves,
    offset: int,
    spec: AttentionSpec,
    first: int,
    most_rows: int,
) -> list[Choice]:
    """Append index keys, and return the choices of the rows from `first` on, in parts whose scores are bounded.

    of_indexer: index queries (1, T, I * J), their weights (1, T, I), and index keys (1, T, J).
    most_rows: of a part, whatever the size of its scores.

    The others are as in `attend_indexed`.
    """
    assert spec.chosen is not None
    queries, weights, new_keys = of_indexer
    _, length, heads = weights.shape
    queries = _rotated(ops, _heads(queries, heads), offset, spec)  # (1, I, T, J)
    append_halves(index_keys, _rotated(ops, new_keys[:, None], offset, spec), offset)
    score_bytes = 4 * heads * (offset + length)  # of a row
    parts = in_parts(first, length, min(most_rows, SCORES[mx.default_device().type] // score_bytes))
    if not parts:
        return []
    blocks = -(-(offset + length) // BLOCK)
    keys = ops.prepare(Weight(joined_halves(index_keys, slice(blocks * BLOCK))), queries.dtype, exact=True)
    choices = []
    for part in parts:
        scores = _scores(ops, queries[0, :, part], weights[0, part], keys)
        last = offset + mx.arange(part.start, part.stop)
        choices.append(Choice(part, largest(scores, last, spec.chosen)))
    return choices


def _scores(ops: "Ops", queries: mx.array, weights: mx.array, keys: Weight) -> mx.array:
    """Return the scores (rows, entries). queries (I, rows, J), weights (rows, I), keys (entries, J): whole blocks.

    The sums over heads are of BLOCK entries each, so that a score has the same bits in any pass.
    """
    rows, heads = weights.shape
    products = ops.linear(mx.contiguous(queries.swapaxes(0, 1)).reshape(1, rows * heads, -1), keys)
    products = mx.maximum(products, 0).reshape(rows, heads, -1, BLOCK).swapaxes(1, 2)  # (rows, blocks, I, BLOCK)
    return (weights[:, None, None] @ products).reshape(rows, -1)


def largest(scores: mx.array, last: mx.array, count: int) -> mx.array:
    """Return the indices of the `count` largest of visible scores, ascending, (rows, ..., count).

    scores (rows, ..., entries). last (rows,): index of the last score that a row sees, `count` or more.
    """
    size = scores.shape[-1]
    indices = mx.arange(size)
    is_visible = indices <= last.reshape(-1, *(1,) * (scores.ndim - 1))
    scores = mx.where(is_visible, scores, -mx.inf)
    # The value of the last chosen entry. Of entries with this value the first ones are taken, as many as are left.
    least = mx.partition(scores, size - count, axis=-1)[..., size - count, None]
    is_above = scores > least
    is_equal = scores == least
    room = count - is_above.sum(axis=-1, keepdims=True)
    is_chosen = is_above | (is_equal & (mx.cumsum(is_equal.astype(mx.int32), axis=-1) <= room))
    # The last index stands for those that are not chosen: scores that are no numbers choose too few.
    return mx.sort(mx.where(is_chosen, indices, size - 1), axis=-1)[..., :count]


def _heads(x: mx.array, heads: int) -> mx.array:
    """Return (1, T, heads * size) as (1, heads, T, size)."""
    return x.reshape(1, x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _rotated(ops: "Ops", x: mx.array, offset: int, spec: AttentionSpec) -> mx.array:
    """Rotate the first numbers of heads (1, heads, T, size)."""
    if spec.rope is None:
        return x
    return ops.rotate_heads(x, spec.rope, offset)


def append_halves(halves: Halves, rows: mx.array, offset: int) -> None:
    """Write rows (1, 1, T, D) at positions from `offset` on."""
    end = offset + rows.shape[2]
    for half, part in zip(halves, mx.split(rows, 2, axis=-1), strict=True):
        half[:, :, offset:end] = part.astype(half.dtype)


def joined_halves(halves: Halves, positions: slice | mx.array) -> mx.array:
    """Return the entries at positions (...), whole: (..., D)."""
    return mx.concatenate([half[0, 0, positions] for half in halves], axis=-1)


def in_parts(first: int, last: int, size: int) -> list[slice]:
    """Return [first, last) in parts of at most `size`, or 1."""
    size = max(1, size)
    return [slice(begin, min(begin + size, last)) for begin in range(first, last, size)]
