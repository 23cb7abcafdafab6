"""Block-sparse attention: an indexer chooses the blocks of entries that a query attends to (MiniMax M3).

Every token has one index key. The indexer has a query head for each K/V head, which chooses for all query heads of that
one. The score of a block is the largest product of the index query with the block's visible keys. A query attends to
the last `BlockChooser.local` blocks, its own included, and to those with the largest scores, `AttentionSpec.chosen`
entries in all, as far as it sees them. It attends to all entries if it sees no more blocks than that.

`SlotCache.attend` calls it for layers whose `AttentionSpec` has a `chooser`; `runtime.ops.indexed` chooses single
entries instead. Guards: tests/parity/test_indexed.py (any split of a prompt) and test_mlx_lm_families.py (logits).

T = new tokens, H = query heads, Hkv = K/V heads, D = head size, J = size of an index key, k = chosen entries.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace.runtime.ops.attention import SCORES, placed_heads
from headrace.runtime.ops.indexed import Halves, append_halves, in_parts, joined_halves, largest
from headrace.runtime.ops.passes import BLOCK, Phase
from headrace.runtime.ops.weights import AttentionSpec, BlockChooser, Projections, Weight

if TYPE_CHECKING:
    from headrace.runtime.ops import Ops

KeysValues = tuple[mx.array, mx.array]
"""Keys and values of all entries, (1, Hkv, capacity, D) each."""


def attend_blocks(
    ops: "Ops",
    rows: Projections,
    entries: KeysValues,
    index_keys: Halves,
    offset: int,
    spec: AttentionSpec,
    phase: Phase,
) -> mx.array:
    """Normalize, rotate, append, and attend causally over the chosen blocks -> (1, T, H * D).

    ops: attend and multiply.
    rows: q, k and v as one array or three, then index queries (1, T, Hkv * J) and index keys (1, T, J), of positions
        [offset, offset + T).
    entries, index_keys: those of the positions before, with room for T more; written in place.
    offset: position of the first new token.
    spec: of the layer, with a `chooser`.
    phase: of the pass.
    """
    *qkv, index_queries, new_index_keys = rows
    chooser = spec.chooser
    chosen = spec.chosen
    assert chooser is not None
    assert chosen is not None
    # Append the new entries and index keys.
    q, k, v = placed_heads(qkv, offset, spec)  # (1, H, T, D) and (1, Hkv, T, D)
    assert k is not None
    assert v is not None
    length = q.shape[2]
    end = offset + length
    for stored, new in zip(entries, (k, v), strict=True):
        stored[:, :, offset:end] = new.astype(stored.dtype)
    index_q, index_k, _ = placed_heads([index_queries, new_index_keys], offset, chooser.heads)
    assert index_k is not None
    append_halves(index_keys, index_k, offset)

    # The first rows see no more entries than may be chosen: they attend to all of them, without scores.
    seeing_all = min(length, max(0, chosen - offset))
    parts = chain(
        _attend_to_all(ops, q[:, :, :seeing_all], entries, offset, spec, phase),
        _attend_to_chosen(
            ops, q[:, :, seeing_all:], index_q[:, :, seeing_all:], entries, index_keys, offset + seeing_all, spec, phase
        ),
    )
    outs: list[mx.array] = []
    for out in parts:
        mx.eval(outs)  # of the part before: MLX would allocate the scores and copies of all parts together
        outs.append(out)
    out = mx.concatenate(outs, axis=2)  # (1, H, T, D)
    return out.transpose(0, 2, 1, 3).reshape(1, length, -1)


def _attend_to_all(
    ops: "Ops", q: mx.array, entries: KeysValues, offset: int, spec: AttentionSpec, phase: Phase
) -> Iterator[mx.array]:
    """Yield the results (1, H, rows, D) of queries that attend to all entries they see.

    q: queries (1, H, T, D) of the positions from `offset` on. All other parameters: see `attend_blocks`.
    """
    length = q.shape[2]
    if length == 0:
        return
    score_bytes = 4 * spec.heads * (offset + length)  # of a query
    for part in in_parts(0, length, SCORES[mx.default_device().type] // score_bytes):
        keys, values = (stored[:, :, : offset + part.stop] for stored in entries)
        mask = None if part.stop - part.start == 1 else "causal"
        yield ops.attend_heads(q[:, :, part], keys, values, spec.scale, mask, spec.sinks, phase)


def _attend_to_chosen(
    ops: "Ops",
    q: mx.array,
    index_q: mx.array,
    entries: KeysValues,
    index_keys: Halves,
    offset: int,
    spec: AttentionSpec,
    phase: Phase,
) -> Iterator[mx.array]:
    """Yield the results (1, H, rows, D) of queries that choose blocks by scores, and attend to copies of their entries.

    q, index_q: queries (1, H, T, D) and index queries (1, Hkv, T, J) of the positions from `offset` on.
    All other parameters: see `attend_blocks`.
    """
    length = q.shape[2]
    if length == 0:
        return
    chooser = spec.chooser
    chosen = spec.chosen
    assert chooser is not None
    assert chosen is not None
    end = offset + length
    # Scores and copies of entries both bound the rows of a part.
    index_bytes = 4 * spec.kv_heads * end
    copy_bytes = 2 * chosen * spec.kv_heads * spec.head_dim * entries[0].itemsize
    seen = joined_halves(index_keys, slice(-(-end // BLOCK) * BLOCK))  # `end`, rounded up to whole blocks
    prepared_keys = ops.prepare(Weight(seen), mx.float32, exact=True)
    head = mx.arange(spec.kv_heads)[:, None]
    for part in in_parts(0, length, SCORES[mx.default_device().type] // max(index_bytes, copy_bytes)):
        positions = mx.arange(offset + part.start, offset + part.stop)  # of the queries
        scores = _block_scores(ops, index_q[0, :, part], prepared_keys, positions, chooser)
        blocks = largest(scores, positions // chooser.block, chosen // chooser.block)  # (rows, Hkv, blocks)
        of_entries, is_visible = _entries_of(blocks, positions, chooser.block)
        of_entries = mx.minimum(of_entries, end - 1)  # the newest block may not be full; what is beyond is not visible
        keys, values = (stored[0][head, of_entries] for stored in entries)  # (rows, Hkv, k, D)
        alone = q[0, :, part].swapaxes(0, 1)[:, :, None]  # (rows, H, 1, D)
        out = ops.attend_heads(alone, keys, values, spec.scale, is_visible, spec.sinks, phase)
        yield out.transpose(2, 1, 0, 3)


def _entries_of(blocks: mx.array, positions: mx.array, block: int) -> tuple[mx.array, mx.array]:
    """Return the entries of chosen blocks (rows, Hkv, k), and those that the queries see (rows, 1, 1, k).

    blocks: the chosen ones, ascending (rows, Hkv, blocks).
    positions: of the queries (rows,).
    block: entries of a block.
    """
    entries = blocks[..., None] * block + mx.arange(block)
    entries = entries.flatten(-2)
    # All heads choose the query's own block, since it is local, and it is the last, since blocks ascend. A query sees a
    # part of this block and all of the others, so one head tells for all.
    return entries, (entries[:, :1] <= positions[:, None, None])[:, :, None]


def _block_scores(ops: "Ops", queries: mx.array, keys: Weight, positions: mx.array, chooser: BlockChooser) -> mx.array:
    """Return the scores of blocks (rows, Hkv, blocks), infinite for local ones.

    queries (Hkv, rows, J), keys (entries, J), positions (rows,) of the queries.
    """
    heads, rows, size = queries.shape
    stacked = mx.contiguous(queries.swapaxes(0, 1)).reshape(1, rows * heads, size).astype(mx.float32)
    scores = ops.linear(stacked, keys).reshape(rows, heads, -1)  # (rows, Hkv, entries)
    scores = mx.where(mx.arange(scores.shape[-1]) <= positions[:, None, None], scores, -mx.inf)
    missing = -scores.shape[-1] % chooser.block
    scores = mx.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)
    scores = scores.reshape(rows, heads, -1, chooser.block).max(axis=-1)
    query_block = (positions // chooser.block)[:, None, None]
    block = mx.arange(scores.shape[-1])
    is_local = (block <= query_block) & (block > query_block - chooser.local)
    return mx.where(is_local, mx.inf, scores)
