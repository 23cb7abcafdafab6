"""Operations of a decoder layer in stock MLX: used on Metal and CUDA, and the reference for the native kernels.

Contract: activations keep their dtype (no float32 constant may promote them). Each function defines the operation of
the same name in `Ops`, which has shapes, units and the letters of comments; larger parts stand in modules of their own
(attention, mixtures, recurrent, stock_sampling).

Guards: tests/parity/test_numpy_decoder.py and tests/runtime/ops/test_native_kernels.py.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from headrace.runtime.ops import attention as attention_parts
from headrace.runtime.ops import groups_of_16, metal, mixtures, recurrent, stock_sampling
from headrace.runtime.ops.activations import ACTIVATIONS, Curve, GatedCurve, gated, unit
from headrace.runtime.ops.attention import attention, placed_heads
from headrace.runtime.ops.kv_format import Coding, KVFormat, plain
from headrace.runtime.ops.layer_weights import LayersNode, LayerWeights
from headrace.runtime.ops.mixtures import gathered
from headrace.runtime.ops.passes import BLOCK, KVStore, Pass, Phase
from headrace.runtime.ops.weights import AttentionSpec, LowRank, Mixture, Projections, SampleRule, Weight

name = "reference"
attend_heads = attention_parts.attend_heads
rotate_heads = attention_parts.rotate_heads
expert_linear = mixtures.expert_linear
join_experts = mixtures.join_experts
add_norms = metal.add_norms
mix_pass = recurrent.mix_pass
_SORTED = 64  # (token, expert) pairs from which sorting by expert pays, as in mlx-lm


def prepare(weight: Weight, dtype: mx.Dtype, *, exact: bool = False) -> Weight:  # noqa: ARG001
    """Return the weight with scales, biases and plain data in the compute dtype, so that MLX casts none per step.

    Groups of 16 become groups of 32.
    """
    weight = groups_of_16.regrouped(weight)

    def converted(array: mx.array | None) -> mx.array | None:
        if array is None or array.dtype == mx.uint8:
            return array
        return array.astype(dtype)

    data = weight.data
    if not weight.quantized:
        data = data.astype(dtype)
    return Weight(
        data=data,
        scales=converted(weight.scales),
        biases=converted(weight.biases),
        bits=weight.bits,
        group_size=weight.group_size,
        bias=converted(weight.bias),
        mode=weight.mode,
    )


def add_low_rank(_weight: Weight, _products: Sequence[LowRank]) -> None:
    """Return None: a product is of one weight, and others are added to it (`models.network.adapted`)."""


def kv_format(compute: mx.Dtype) -> KVFormat:
    """Return the plain K/V format in the compute dtype: converting a cache per step costs more than reading it."""
    return plain(compute)


def supports_packed(head_dim: int) -> bool:
    """Return whether attention reads packed K/V of this head size: MLX quantizes in whole groups of 32."""
    return head_dim % 32 == 0


def packed_format(kv: KVFormat, head_dim: int) -> KVFormat:
    """Return the MLX layout of a packed format: groups have an offset, and 64 values if possible."""
    group = 64 if head_dim % 64 == 0 else 32
    keys, values = (Coding(coding.bits, group, group_bytes=4) for coding in (kv.keys, kv.values))
    return replace(kv, keys=keys, values=values)


def grow(buffer: mx.array, capacity: int) -> mx.array:
    """Return the buffer with zeros in the new entries."""
    batch, heads, entries, dim = buffer.shape
    return mx.concatenate([buffer, mx.zeros((batch, heads, capacity - entries, dim), buffer.dtype)], axis=2)


def embed(tokens: mx.array, table: Weight, dtype: mx.Dtype, first: int | None = None) -> mx.array:
    if first is not None:
        # A part of the vocabulary: look up row 0 for other tokens, then replace it.
        row = tokens.astype(mx.int32) - first
        inside = (row >= 0) & (row < table.rows)
        return mx.where(inside[..., None], embed(mx.where(inside, row, 0), table, dtype), 0)
    if table.scales is None:
        return table.data[tokens].astype(dtype)
    scales = table.scales[tokens]
    biases = None
    if table.biases is not None:
        biases = table.biases[tokens].astype(dtype)
        scales = scales.astype(dtype)  # else MLX computes in their dtype
    return mx.dequantize(
        table.data[tokens], scales, biases, group_size=table.group_size, bits=table.bits, mode=table.mode, dtype=dtype
    )


def linear(x: mx.array, w: Weight) -> mx.array:
    if w.scales is None:
        y = x @ w.data.T
    else:
        y = mx.quantized_matmul(
            x,
            w.data,
            scales=w.scales,
            biases=w.biases,
            transpose=True,
            group_size=w.group_size,
            bits=w.bits,
            mode=w.mode,
        )
    if w.bias is not None:
        y = y + w.bias
    return y


def linear_add(x: mx.array, w: Weight, residual: mx.array) -> mx.array:
    return residual + linear(x, w)


def linear_add_norm(x: mx.array, w: Weight, *added: Any) -> tuple[mx.array, mx.array | None]:
    """See `Ops`. added: the other arguments of `add_norms`."""
    return add_norms(linear(x, w), *added)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)


def layer_norm(x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
    return mx.fast.layer_norm(x, weight, bias, eps)


def norm_linear(x: mx.array, norm: mx.array | None, eps: float, w: Weight) -> mx.array:
    if norm is not None:
        x = rms_norm(x, norm, eps)
    return linear(x, w)


def glu(gate: mx.array, up: mx.array, activation: str | GatedCurve) -> mx.array:
    return gated(gate, up, activation, compiled=on_gpu())


def activate(x: mx.array, activation: str) -> mx.array:
    return ACTIVATIONS[activation](x, mx.array(1, x.dtype))


def norm_glu(x: mx.array, norm: mx.array | None, eps: float, w: Weight, activation: str | Curve) -> mx.array:
    return unit(norm_linear(x, norm, eps, w), activation, compiled=on_gpu())


def experts(
    x: mx.array,
    norm: mx.array,
    eps: float,
    m: Mixture,
    activation: str,
    normed: mx.array | None = None,
    entered: mx.array | None = None,
) -> mx.array:
    h = normed
    if h is None:
        h = rms_norm(x, norm, eps)
    router_input = h if entered is None else entered
    if m.router_norm is not None:
        router_input = rms_norm(x, m.router_norm, eps)
    chosen, shares = mixtures.routed(linear(router_input, m.router), m, compiled=on_gpu())  # (B, T, active) each
    # A pair is a token and one of its experts. Many pairs are sorted by expert, so that each one's rows stand together;
    # for few of them MLX gathers the rows of tokens by index.
    if m.latent is not None:
        h = linear(h, m.latent.into)
    indices = chosen.flatten()
    order = mx.argsort(indices) if indices.size >= _SORTED else None
    tokens = h.reshape(-1, 1, h.shape[-1])  # (B * T, 1, E)
    token = mixtures.token_of_pair(indices.size, m.routing.active)
    rows = None
    token_of_pair = None
    if order is not None:
        tokens = tokens[token[order]]  # (pairs, 1, E)
        indices = indices[order]
    else:
        rows = token
        token_of_pair = mixtures.token_of_pair(indices.size, 1)
        if m.routing.shares_first:
            tokens = tokens[token]
            rows = token_of_pair
    if m.routing.shares_first:  # each pair has its own row by now
        factors = shares.flatten()
        if order is not None:
            factors = factors[order]
        tokens = tokens * factors[:, None, None].astype(tokens.dtype)
        shares = mx.ones_like(shares)
    # The experts' feed-forward, then the pairs in their order again, and the sum over each token's experts.
    inputs = [gathered(tokens, stack, indices, rows) for stack in (m.gate, m.up) if stack is not None]
    inner = unit(mx.concatenate(inputs, axis=-1), activation if m.curve is None else m.curve, compiled=on_gpu())
    y = gathered(inner, m.down, indices, token_of_pair)[:, 0]  # (pairs, E)
    if order is not None:
        y = y[mx.argsort(order)]  # sorting a permutation gives its inverse
    y = y.reshape(*chosen.shape, -1)  # (B, T, active, E)
    weights = shares[..., None, :].astype(y.dtype)
    if m.latent is not None:
        total = (weights @ y)[..., 0, :]  # (B, T, L)
        if m.latent.norm is not None:
            total = rms_norm(total, m.latent.norm, m.latent.eps)
        total = linear(total, m.latent.out)
        return x + total if m.residual else total
    if m.residual:
        return mx.addmm(x[..., None, :], weights, y)[..., 0, :]
    return (weights @ y)[..., 0, :]


def attend(
    qkv: Projections,
    keys: mx.array,
    values: mx.array,
    offset: int,
    spec: AttentionSpec,
    first: int = 0,
    _phase: Phase = "prefill",
    slot: int = 0,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `Ops`. Both phases attend alike here.

    slot: index of the first sequence in buffers of more than B sequences.
    """
    q, k, v = placed_heads(qkv, offset, spec)
    batch, _, length, _ = q.shape
    row = offset - first
    end = row + length
    slots = slice(slot, slot + batch)
    if k is not None and v is not None:
        keys[slots, :, row:end] = k.astype(keys.dtype)
        values[slots, :, row:end] = v.astype(values.dtype)

    # No query sees entries before `start`.
    start = max(0, spec.first_seen(offset) - first)
    seen_keys = keys[slots, :, start:end].astype(q.dtype)
    seen_values = values[slots, :, start:end].astype(q.dtype)
    out = attention(q, seen_keys, seen_values, spec, first + start)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, -1), keys, values


def pages(_spec: AttentionSpec) -> bool:
    """Return whether attention reads blocks in place. Here it copies a sequence's blocks into one buffer per step."""
    return False


def slots(spec: AttentionSpec) -> bool:
    """Return whether one operation attends for several sequences (`runtime.ops.slots`): not with a softcap."""
    return spec.softcap is None and spec.chosen is None


def slab(blocks: int, block_shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros((blocks, *block_shape), dtype)
    mx.eval(zeros)
    return zeros


def cut_block(store: KVStore, _group: int, _block: mx.array, _entries: int) -> mx.array:
    """Raise ValueError: stock MLX has no packed blocks."""
    raise ValueError(f"{store.format.name}: stock MLX operations do not read packed blocks")


def write_block(store: KVStore, group: int, block: int, entries: mx.array) -> None:
    slabs = store.groups[group].slabs
    number, index = store.groups[group].find(block)
    slabs[number][index, ..., : entries.shape[-2], :] = entries
    mx.eval(slabs[number])


def attend_pass(qkv: Projections, rows: Pass, layer: int, spec: AttentionSpec) -> mx.array:
    """See `Ops`. The blocks that a sequence sees are copied, and the store's slabs replaced."""
    group, index = rows.store.locations[layer]
    kv = rows.store.groups[group]
    outs = []
    row = 0
    for sequence in rows.sequences:
        part = slice(row, row + sequence.count)
        row += sequence.count
        sequence_qkv = [projected[:, part] for projected in qkv]
        end = sequence.offset + sequence.count
        first = spec.first_seen(sequence.offset) // BLOCK
        last = -(-end // BLOCK)  # rounded up
        table = sequence.tables[group]
        if len(table) < last:
            raise ValueError("block table is too short for its sequence")
        if min(table[first:last]) < 0:
            raise ValueError("block table lacks a block that its sequence sees")
        locations = [kv.find(block) for block in table[first:last]]
        gathered = mx.concatenate([kv.slabs[slab][at, index] for slab, at in locations], axis=2)  # (2, Hkv, entries, D)
        out, *appended = attend(
            sequence_qkv, gathered[0:1], gathered[1:2], sequence.offset, spec, first * BLOCK, sequence.phase
        )
        outs.append(out)
        if not spec.appends:
            continue
        for position in range(sequence.offset // BLOCK * BLOCK, end, BLOCK):
            begin = max(position, sequence.offset)
            stop = min(position + BLOCK, end)
            slab, at = locations[position // BLOCK - first]
            entries = [half[0, :, begin - first * BLOCK : stop - first * BLOCK] for half in appended]
            kv.slabs[slab][at, index, :, :, begin - position : stop - position] = mx.stack(entries)
    return mx.concatenate(outs, axis=1)


def fuse(_layers: Sequence[LayerWeights], _eps: float, _activation: str, **_: object) -> LayersNode | None:
    """Return None: stock MLX cannot run whole layers as one node."""
    return None


def on_gpu() -> bool:
    return mx.default_device().type != mx.DeviceType.cpu


def greedy(logits: mx.array) -> mx.array:
    return stock_sampling.greedy(logits)


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """Choose a token for each row. See `runtime.ops.stock_sampling`."""
    if on_gpu():
        return stock_sampling.sample_on_gpu(logits, rules, keys)
    return stock_sampling.sample(logits, rules, keys)


def rounded_to_bytes(x: mx.array, group: int) -> mx.array:
    """Return activations (..., K) as products with weights in groups of `group` see them in 8 bits, in float32.

    This defines the rounding of the native kernels.

    A group of 32 values, or of `group` if that is less, shares a scale: its largest magnitude / 127. In each run of 16
    groups, the eighth with the largest magnitudes (rounded up) have an outlier each, the first value of that
    magnitude: their scale is the second largest / 127, or the largest / 2032 if that is more.
    """
    size = min(group, 32)
    groups = x.reshape(-1, x.shape[-1] // size, size)  # (rows, groups, size)
    order = mx.sort(mx.abs(groups), axis=-1)
    top = mx.maximum(order[..., -1], 1e-30)  # not 0, which it is divided by
    second = mx.maximum(order[..., -2], 1e-30)
    runs = [top[:, i : i + 16] for i in range(0, top.shape[1], 16)]
    ranks = [mx.argsort(mx.argsort(-run, axis=-1), axis=-1) for run in runs]  # sorting the order gives each one's place
    has_outlier = mx.concatenate([rank < (rank.shape[-1] + 7) // 8 for rank in ranks], axis=1)
    peak = mx.where(has_outlier, mx.maximum(second, top / 16), top)[..., None]
    return (mx.round(groups * (127 / peak)) * (peak / 127)).reshape(x.shape)
