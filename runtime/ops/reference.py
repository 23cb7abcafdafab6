"""The operations of a decoder layer in stock MLX: the path Metal and CUDA run, and the reference for every other.

Contract: activations keep their dtype from end to end (no float32 constant may promote them). B = batch,
T = new tokens, E = model width, F = feed-forward width, H and Hkv = query and key-value heads, D = head size.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

from headrace.runtime.ops import groups_of_16
from headrace.runtime.ops.kv_format import Coding, KVFormat, plain
from headrace.runtime.ops.passes import BLOCK, KVStore, Pass, Phase
from headrace.runtime.ops.weights import (
    AttentionSpec,
    LayersNode,
    LayerWeights,
    Mixture,
    Projections,
    SampleRule,
    Weight,
)

name = "reference"
_SORTED = 64  # choices of experts from which on it pays to order them


def prepare(weight: Weight, dtype: mx.Dtype) -> Weight:
    """The weight as these operations want it: scales, biases and plain data in the compute dtype.

    MLX would otherwise cast them to the activations' dtype again on every step. Groups of 16 become groups of 32.
    """
    weight = groups_of_16.without(weight)

    def cast(array: mx.array | None) -> mx.array | None:
        return array if array is None or array.dtype == mx.uint8 else array.astype(dtype)

    return Weight(
        data=weight.data if weight.quantized else weight.data.astype(dtype),
        scales=cast(weight.scales),
        biases=cast(weight.biases),
        bits=weight.bits,
        group_size=weight.group_size,
        bias=cast(weight.bias),
        mode=weight.mode,
    )


def kv_format(compute: mx.Dtype) -> KVFormat:
    """K/V are stored as they are computed: converting a whole cache per step costs more than reading it."""
    return plain(compute)


def packs(head_dim: int) -> bool:
    """Whether attention reads packed formats of such heads: MLX quantizes in whole groups of 32."""
    return head_dim % 32 == 0


def packed_format(kv: KVFormat, head_dim: int) -> KVFormat:
    """How a packed format is stored here: groups have an offset, too, and so 64 numbers where 8 bits can."""

    def coding(wanted: Coding) -> Coding:
        return Coding(wanted.bits, group=64 if wanted.bits == 8 and head_dim % 64 == 0 else 32, beside=4)

    return replace(kv, keys=coding(kv.keys), values=coding(kv.values))


def grow(buffer: mx.array, capacity: int) -> mx.array:
    """A K/V buffer (B, Hkv, entries, D) with room for `capacity` entries: zeros behind what it holds."""
    batch, heads, entries, dim = buffer.shape
    return mx.concatenate([buffer, mx.zeros((batch, heads, capacity - entries, dim), buffer.dtype)], axis=2)


def embed(tokens: mx.array, table: Weight, dtype: mx.Dtype) -> mx.array:
    """Rows of the embedding table. tokens (B, T) -> (B, T, E)."""
    if table.scales is None:
        return table.data[tokens].astype(dtype)
    scales, biases = table.scales[tokens], None if table.biases is None else table.biases[tokens].astype(dtype)
    return mx.dequantize(
        table.data[tokens],
        scales=scales if biases is None else scales.astype(dtype),  # or it would compute in theirs
        biases=biases,
        group_size=table.group_size,
        bits=table.bits,
        mode=table.mode,
        dtype=dtype,
    )


def linear(x: mx.array, w: Weight) -> mx.array:
    """x @ w.T (+ bias). x (B, T, K) -> (B, T, N)."""
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
    return y if w.bias is None else y + w.bias


def linear_add(x: mx.array, w: Weight, residual: mx.array) -> mx.array:
    """residual + x @ w.T: a block's output projection joins the residual stream. (B, T, K) -> (B, T, N)."""
    return residual + linear(x, w)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Root mean square normalisation over the last axis (Zhang and Sennrich, arXiv:1910.07467)."""
    return mx.fast.rms_norm(x, weight, eps)


def norm_linear(x: mx.array, norm: mx.array, eps: float, w: Weight) -> mx.array:
    """RMSNorm, then a projection. x (B, T, E) -> (B, T, N)."""
    return linear(rms_norm(x, norm, eps), w)


def glu(gate: mx.array, up: mx.array, activation: str) -> mx.array:
    """Gated linear unit: act(gate) * up (Shazeer, arXiv:2002.05202). (B, T, F) and (B, T, F) -> (B, T, F).

    `activation` is "silu", "gelu" (the tanh approximation) or "clamped" (GPT-OSS's). One kernel on a GPU.
    """
    return (_FUSED if on_gpu() else _GATED)[activation](gate, up)


def norm_glu(x: mx.array, norm: mx.array, eps: float, w: Weight, activation: str) -> mx.array:
    """RMSNorm, then a feed-forward's gated half. x (B, T, E), w (2 F, E), gate rows above up rows -> (B, T, F)."""
    gate, up = mx.split(norm_linear(x, norm, eps, w), 2, axis=-1)
    return glu(gate, up, activation)


def experts(x: mx.array, norm: mx.array, eps: float, m: Mixture, activation: str) -> mx.array:
    """x + the shares of its experts' answers to norm(x). (B, T, E) -> (B, T, E)."""
    h = rms_norm(x, norm, eps)
    logits = linear(h, m.router)  # (B, T, X)
    chosen = mx.argpartition(logits, kth=-m.active, axis=-1)[..., -m.active :]  # (B, T, active)
    if m.normalized:
        shares = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True)
    else:
        shares = mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), chosen, axis=-1)
    which = chosen.flatten()
    rows = mx.arange(which.size) // m.active  # of h, for each choice
    order = mx.argsort(which) if which.size >= _SORTED else None  # an expert's rows together
    if order is not None:
        which, rows = which[order], rows[order]
    tokens = h.reshape(-1, 1, h.shape[-1])[rows]  # (choices, 1, E)
    up, gate = (_gathered(tokens, stack, which, order is not None) for stack in (m.up, m.gate))
    inner = glu(gate, up, activation)
    y = _gathered(inner, m.down, which, order is not None)[:, 0]  # (choices, E)
    if order is not None:
        y = y[mx.argsort(order)]
    return x + (y.reshape(*chosen.shape, -1) * shares[..., None]).sum(axis=-2)


def _gathered(x: mx.array, stack: Weight, which: mx.array, ordered: bool) -> mx.array:
    """Each row of x (choices, 1, K) times the matrix of a stack that `which` (choices,) names -> (choices, 1, N)."""
    if stack.scales is None:
        y = mx.gather_mm(x, stack.data.swapaxes(-1, -2), rhs_indices=which, sorted_indices=ordered)
    else:
        y = mx.gather_qmm(
            x,
            stack.data,
            scales=stack.scales,
            biases=stack.biases,
            rhs_indices=which,
            transpose=True,
            group_size=stack.group_size,
            bits=stack.bits,
            mode=stack.mode,
            sorted_indices=ordered,
        )
    return y if stack.bias is None else y + stack.bias[which][:, None]


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
    """Rotate, append K/V to the cache, and attend causally over everything in it.

    qkv (B, T, (H + 2 Hkv) * D) or its three parts; keys, values (B, Hkv, capacity, D) with the entries of positions
    [first, offset) in use, in their first rows, and room for T more; nothing before `first` may be visible. Returns
    (out (B, T, H * D), keys, values): the buffers with the rows of [offset, offset + T) written. Only what is returned
    is to be used afterwards. Both phases attend alike here. slot: of the sequence in buffers of several.
    """
    q, k, v = split_heads(qkv, spec)
    batch, _, length, _ = q.shape
    row = offset - first
    end, own = row + length, slice(slot, slot + batch)
    keys[own, :, row:end] = place(k, spec.k_norm, offset, spec).astype(keys.dtype)
    values[own, :, row:end] = v.astype(values.dtype)
    q = place(q, spec.q_norm, offset, spec)

    # Nothing before `start` is visible to any of the T queries: leave it unread.
    start = 0 if spec.window is None else max(0, row - spec.window + 1)
    seen_keys = keys[own, :, start:end].astype(q.dtype)
    seen_values = values[own, :, start:end].astype(q.dtype)
    out = attended(q, seen_keys, seen_values, spec)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, -1), keys, values


def attended(q: mx.array, keys: mx.array, values: mx.array, spec: AttentionSpec) -> mx.array:
    """Queries (B, H, T, D) of the last positions over all that they may see (B, Hkv, S, D) -> (B, H, T, D)."""
    masked = mask(q.shape[2], keys.shape[2], spec.window)
    if spec.softcap is not None:
        return _softcapped_attention(q, keys, values, masked, spec)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=spec.scale, mask=masked, sinks=spec.sinks)


def pages(_spec: AttentionSpec) -> bool:
    """Whether attention reads blocks where they are. Here it copies all of a sequence's into one buffer, every step."""
    return False


def slots(spec: AttentionSpec) -> bool:
    """Whether one operation is the attention of several sequences (`runtime.ops.slots`): softcaps have none."""
    return spec.softcap is None


def slab(blocks: int, block_shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Room for K/V: zeros (blocks, L, 2, Hkv, BLOCK, D), evaluated."""
    zeros = mx.zeros((blocks, *block_shape), dtype)
    mx.eval(zeros)
    return zeros


def cut_block(store: KVStore, _block: mx.array, _entries: int) -> mx.array:
    """Of packed blocks, which there are none of here."""
    raise ValueError(f"{store.format.name} blocks are not read by stock MLX operations")


def write_block(store: KVStore, group: int, block: int, entries: mx.array) -> None:
    """Entries (L, 2, Hkv, n, D) become a block's first n, at once. No pass under way may have the block."""
    slabs = store.groups[group].slabs
    number, index = store.groups[group].find(block)
    slabs[number][index, ..., : entries.shape[-2], :] = entries
    mx.eval(slabs[number])


def attend_pass(qkv: Projections, rows: Pass, layer: int, spec: AttentionSpec) -> mx.array:
    """`attend` for the rows of a pass, each over the entries of its own sequence, which it joins.

    qkv (1, N, (H + 2 Hkv) * D) or its three parts -> (1, N, H * D). `layer` counts the network's. What is appended goes
    to the store's slabs, which are other arrays afterwards. Raises ValueError where a table is too short, lacks a block
    that is seen, or names one that no slab has.
    """
    group, index = rows.store.places[layer]
    kv = rows.store.groups[group]
    outs, row = [], 0
    for sequence in rows.sequences:
        part = slice(row, row + sequence.count)
        row += sequence.count
        own = qkv[:, part] if isinstance(qkv, mx.array) else [x[:, part] for x in qkv]
        end = sequence.offset + sequence.count
        seen = 0 if spec.window is None else max(0, sequence.offset - spec.window + 1)
        first, last = seen // BLOCK, -(-end // BLOCK)
        table = sequence.tables[group]
        if len(table) < last:
            raise ValueError("a table is too short for its sequence")
        if min(table[first:last]) < 0:
            raise ValueError("a table lacks a block that its sequence sees")
        places = [kv.find(block) for block in table[first:last]]
        held = mx.concatenate([kv.slabs[slab][at, index] for slab, at in places], axis=2)  # (2, Hkv, entries, D)
        out, *appended = attend(own, held[0:1], held[1:2], sequence.offset, spec, first * BLOCK, sequence.phase)
        outs.append(out)
        for position in range(sequence.offset // BLOCK * BLOCK, end, BLOCK):
            begin, stop = max(position, sequence.offset), min(position + BLOCK, end)
            slab, at = places[position // BLOCK - first]
            entries = [half[0, :, begin - first * BLOCK : stop - first * BLOCK] for half in appended]
            kv.slabs[slab][at, index, :, :, begin - position : stop - position] = mx.stack(entries)
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)


def fuse(_layers: Sequence[LayerWeights], _eps: float, _activation: str) -> LayersNode | None:
    """Whole layers as one node: stock MLX has no such thing."""
    return None


def _silu_gated(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _gelu_gated(gate: mx.array, up: mx.array) -> mx.array:
    # 0.5 (1 + tanh z) is sigmoid(2 z), where nothing cancels. Terms are paired so that the chain is as short as it can
    # be: MLX compiles no more than 11 operations deep into a kernel, and a product counts two.
    doubled = 1.5957691216057308 * gate + mx.square(gate) * (0.07135481627260025 * gate)
    return gate * mx.sigmoid(doubled) * up


# Compiled, a chain of elementwise operations is one kernel for every shape. Not on the CPU, where MLX would call a C++
# compiler for it while the answer waits.
def _clamped_gated(gate: mx.array, up: mx.array) -> mx.array:
    gate, up = mx.minimum(gate, 7.0), mx.clip(up, -7.0, 7.0)
    return gate * mx.sigmoid(1.702 * gate) * (up + 1)


_GATED = {"silu": _silu_gated, "gelu": _gelu_gated, "clamped": _clamped_gated}
_FUSED = {name: mx.compile(gated, shapeless=True) for name, gated in _GATED.items()}


def on_gpu() -> bool:
    return mx.default_device().type != mx.DeviceType.cpu


def split_heads(qkv: Projections, spec: AttentionSpec) -> tuple[mx.array, mx.array, mx.array]:
    """(B, T, (H + 2 Hkv) * D), or its three parts -> q (B, H, T, D), k and v (B, Hkv, T, D)."""

    def heads(x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, spec.head_dim).transpose(0, 2, 1, 3)

    if isinstance(qkv, mx.array):
        q, k, v = mx.split(heads(qkv), [spec.heads, spec.heads + spec.kv_heads], axis=1)
    else:
        q, k, v = map(heads, qkv)
    return q, k, v


def place(x: mx.array, norm: mx.array | None, offset: int | mx.array, spec: AttentionSpec) -> mx.array:
    """Per-head norm and rotation of queries or keys. x (B, heads, T, D) -> the same shape. offset: of all, or (B,)."""
    if norm is not None:
        x = mx.fast.rms_norm(x, norm, spec.norm_eps)
    rope = spec.rope
    if rope is None:
        return x
    if rope.amplitude != 1.0:
        rotated = x[..., : rope.dims] * rope.amplitude
        x = rotated if rope.dims == spec.head_dim else mx.concatenate([rotated, x[..., rope.dims :]], axis=-1)
    return mx.fast.rope(x, rope.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=rope.periods)


def mask(queries: int, keys: int, window: int | None) -> mx.array | str | None:
    """What SDPA needs to keep `queries` last positions from looking ahead or past the window."""
    if queries == 1:
        return None  # a window has already been cut from the keys
    if window is None or keys <= window:
        return "causal"
    q = mx.arange(keys - queries, keys)[:, None]
    k = mx.arange(keys)[None]
    return (k <= q) & (k > q - window)


def hidden(scores: mx.array, masked: mx.array | str | None) -> mx.array:
    """Scores (..., T, S) that nobody may see as the least there are, as a mask of SDPA's says."""
    length, entries = scores.shape[-2:]
    if isinstance(masked, str):
        masked = mx.arange(entries - length, entries)[:, None] >= mx.arange(entries)[None]
    return scores if masked is None else mx.where(masked, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _softcapped_attention(
    q: mx.array, keys: mx.array, values: mx.array, masked: mx.array | str | None, spec: AttentionSpec
) -> mx.array:
    """Attention with soft-capped scores (Gemma 2, arXiv:2408.00118); MLX has no fused form of it."""
    assert spec.softcap is not None
    assert spec.sinks is None, "no model has both"
    batch, heads, length, dim = q.shape
    grouped = (q * spec.scale).reshape(batch, spec.kv_heads, heads // spec.kv_heads, length, dim)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2)  # (B, Hkv, H / Hkv, T, keys)
    scores = hidden(mx.tanh(scores / spec.softcap) * spec.softcap, masked)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(batch, heads, length, dim)


def greedy(logits: mx.array) -> mx.array:
    """The token of the largest logit. (B, V) -> (B,) uint32."""
    return mx.argmax(logits, axis=-1)


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """A token for each row by its own rule: divide by the temperature, keep top-k, top-p and min-p of it, and draw.

    logits (B, V) float32 -> (B,) uint32. A key is 64 random bits, all that a draw needs: it goes through the kept
    tokens in the order of the vocabulary, to where that share of their mass ends. Of equal logits at a cut the first
    stay; where one is no number, that is chosen. A row's token is the same whatever rows are beside it.
    """
    is_greedy = [rule.temperature == 0 for rule in rules]
    best = greedy(logits)
    if all(is_greedy):
        return best

    def column(values: Iterable[float]) -> mx.array:
        return mx.array(list(values), mx.float32)[:, None]

    size = logits.shape[-1]
    mass = mx.softmax(logits / column(rule.temperature or 1.0 for rule in rules), axis=-1)
    if any(0 < rule.top_k < size or rule.top_p < 1 for rule in rules):
        order = mx.argsort(-logits, axis=-1)
        sorted_mass = mx.take_along_axis(mass, order, axis=-1)
        kept = mx.arange(size) < column(rule.top_k or size for rule in rules)
        sorted_mass = mx.where(kept, sorted_mass, 0.0)
        before = mx.cumsum(sorted_mass, axis=-1) - sorted_mass
        edges = column(rule.top_p if rule.top_p < 1 else math.inf for rule in rules)
        kept &= before < edges * sorted_mass.sum(axis=-1, keepdims=True)
        mass = mx.put_along_axis(mx.zeros_like(mass), order, mx.where(kept, sorted_mass, 0.0), axis=-1)
    floor = column(rule.min_p for rule in rules) * mass.max(axis=-1, keepdims=True)
    mass = mx.where(mass < floor, 0.0, mass)
    reached = mx.where(mass > 0, mx.cumsum(mass, axis=-1), 0.0)  # a parallel sum may grow where nothing is added
    points = column((key >> 40) * 2.0**-24 for key in keys)
    drawn = mx.argmax(reached > points * reached.max(axis=-1, keepdims=True), axis=-1)  # the first
    draws = mx.isfinite(logits.max(axis=-1)) & ~mx.array(is_greedy)
    return mx.where(draws, drawn, best)
