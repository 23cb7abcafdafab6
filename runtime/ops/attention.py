"""Attention parts in stock MLX: head split, rotation, masks and attention over plain K/V.

Fused kernels keep no scores. Where MLX has none, or takes another path by itself, scores are bounded by SCORES: a fused
kernel is forced, or the queries attend in pieces.

`reference.attend`, `packed`, `slots` and the sparse kinds build on `placed_heads`, `sdpa_mask` and `attention`. Sizes
of heads and queries below are those of MLX's kernels: they follow MLX's sources, and change with its version.
tests/runtime/ops/test_attention.py bounds the memory; tests/parity/test_numpy_decoder.py and
tests/models/network/test_rope.py compare results with plain computations.

Everywhere `spec` is the layer's attention, `begin` the position of the first key, and a mask one of MLX's: "causal", or
an array that is True where a query sees a key; None: all see all.
B = batch, T = new tokens, S = visible entries, H and Hkv = query and key-value heads, D = head size.
"""

import math
from functools import lru_cache
from typing import Literal

import mlx.core as mx

from headrace.runtime.ops import metal
from headrace.runtime.ops.passes import Phase
from headrace.runtime.ops.weights import AttentionSpec, Projections, Rope

SCORES = {mx.DeviceType.cpu: 24 << 20, mx.DeviceType.gpu: 128 << 20}  # bytes, of the queries that attend at once
FUSED = frozenset({64, 72, 80, 96, 128})  # head sizes of Metal's fused attention of many queries (CUDA's: up to 128)
FORCED = frozenset({192, 256})  # head sizes that Metal's has, but uses only if it is forced
_VECTOR = 8  # queries up to which attention takes kernels for few ones
_VECTOR_ROWS = 32  # queries times query heads of a K/V head, of these kernels on Metal
_VECTOR_SIZES = frozenset({64, 96, 128, 192, 256})  # their head sizes


def split_heads(qkv: Projections, spec: AttentionSpec) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Split projections into q (B, H, T, D), k and v (B, Hkv, T, D), v normalized.

    k and v are None where the layer has none (`AttentionSpec.projects`).
    """
    parts = [_heads(part, spec) for part in _parts(qkv, spec)]
    if not spec.appends:
        return parts[0], None, None
    q, k = parts[:2]
    v = parts[-1]  # the keys, where a layer projects no values
    if spec.v_norm:
        v = mx.fast.rms_norm(v, None, spec.norm_eps)
    return q, k, v


def _parts(qkv: Projections, spec: AttentionSpec) -> Projections:
    """Return the projections of a layer apart, (B, T, heads * D) each."""
    # One array has q, k and v one after the other: they were one product.
    if len(qkv) > 1:
        return qkv
    ends = [spec.heads * spec.head_dim, (spec.heads + spec.kv_heads) * spec.head_dim]
    return list(mx.split(qkv[0], ends[: len(spec.projects) - 1], axis=-1))


def _heads(x: mx.array, spec: AttentionSpec) -> mx.array:
    return x.reshape(*x.shape[:2], -1, spec.head_dim).transpose(0, 2, 1, 3)


@lru_cache(maxsize=4)
def _position(offset: int) -> mx.array:
    """Return a position as an array, the same for all layers of a pass."""
    return mx.array([offset], mx.int32)


def placed_heads(
    qkv: Projections, offset: int | mx.array, spec: AttentionSpec
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Split as `split_heads`; apply norms, rotation and growth. offset: one, or one per row (B,).

    Queries and keys of one sequence are rotated together, if they have no norms: one kernel fewer.
    """
    no_norms = spec.q_norm is None and spec.k_norm is None and not spec.unit_norms
    one_sequence = len(qkv) == 1 and qkv[0].shape[0] == 1
    together = one_sequence and no_norms and spec.rope is not None and spec.appends
    parts = _parts(qkv, spec)
    placed = parts
    if spec.appends:  # values only if they have a norm; they may be the keys
        placed = [*parts, parts[-1]][: 2 + spec.v_norm]
    if not spec.unit_norms and metal.places_heads(placed, spec, together=together):
        positions = _position(offset) if isinstance(offset, int) else offset
        q, *others = metal.place_heads(placed, positions, spec)
        q = _grown(q, offset, spec)
        if not others:
            return q, None, None
        if len(others) == 1:
            others.append(_heads(parts[-1], spec))
        placed_keys, values = others
        return q, placed_keys, values
    q, k, v = split_heads(parts, spec)
    if together:
        both = _heads(qkv[0][..., : (spec.heads + spec.kv_heads) * spec.head_dim], spec)
        q, k = mx.split(_rotated(both, offset, spec), [spec.heads], axis=1)
    else:
        q = _norm_and_rotate(q, spec.q_norm, offset, spec)
        if k is not None:
            k = _norm_and_rotate(k, spec.k_norm, offset, spec)
    return _grown(q, offset, spec), k, v


def _grown(q: mx.array, offset: int | mx.array, spec: AttentionSpec) -> mx.array:
    """Multiply queries (B, H, T, D) by the factors of their positions, see `AttentionSpec.growth`."""
    if spec.growth is None:
        return q
    # A position that the host knows has its factor computed once for all layers.
    if isinstance(offset, int):
        factors = _growth(spec.growth, offset, q.shape[2], q.dtype)
        if factors is None:
            return q
        return q * factors
    beta, length, ahead = spec.growth
    positions = mx.arange(q.shape[2]) + offset[:, None]  # (B, T)
    factor = 1 + beta * mx.log(1 + mx.floor((positions + ahead) / length))
    return q * factor[:, None, :, None].astype(q.dtype)


@lru_cache(maxsize=4)
def _growth(growth: tuple[float, int, int], first: int, count: int, dtype: mx.Dtype) -> mx.array | None:
    """Return the factors of positions from `first`, (count, 1): one array for all layers; None if all are 1."""
    beta, length, ahead = growth
    steps = [(at + ahead) // length for at in range(first, first + count)]
    if not any(steps):
        return None
    return mx.array([[1 + beta * math.log1p(step)] for step in steps], dtype)


def _norm_and_rotate(x: mx.array, norm: mx.array | None, offset: int | mx.array, spec: AttentionSpec) -> mx.array:
    """Apply norm and rotation to queries or keys (B, heads, T, D). offset: one, or one per row (B,)."""
    if spec.norm_last:
        x = _rotated(x, offset, spec)
        if norm is not None or spec.unit_norms:
            x = mx.fast.rms_norm(x, norm, spec.norm_eps)
        return x
    if norm is not None and norm.size == spec.head_dim:
        x = mx.fast.rms_norm(x, norm, spec.norm_eps)
    elif norm is not None:  # over all heads
        together = mx.fast.rms_norm(x.swapaxes(1, 2).flatten(2), norm, spec.norm_eps)
        x = together.reshape(*together.shape[:2], -1, spec.head_dim).swapaxes(1, 2)
    return _rotated(x, offset, spec)


def _rotated(x: mx.array, offset: int | mx.array, spec: AttentionSpec) -> mx.array:
    if spec.rope is None:
        return x
    return rotate_heads(x, spec.rope, offset)


def sdpa_mask(queries: int, keys: int, spec: AttentionSpec, begin: int) -> mx.array | str | None:
    """Return the SDPA mask of the last `queries` positions: causal, and within the window. begin: of the first key."""
    if queries == 1:
        return None  # the keys are already cut to the window
    window = spec.window
    if window is None or spec.first_seen(begin + keys - 1) <= begin:
        return "causal"
    # The queries are the last positions of the keys.
    q = mx.arange(keys - queries, keys)[:, None]  # indices of keys, of the queries themselves (T, 1)
    k = mx.arange(keys)[None]  # (1, S)
    if spec.chunked:
        in_window = (k + begin) // window == (q + begin) // window
    else:
        in_window = k > q - window
    return (k <= q) & in_window


def apply_mask(scores: mx.array, masked: mx.array | str | None) -> mx.array:
    """Set masked scores (..., T, S) to the least finite value. masked: a mask of SDPA."""
    if masked is None:
        return scores
    if isinstance(masked, str):
        length, entries = scores.shape[-2:]
        masked = mx.arange(entries - length, entries)[:, None] >= mx.arange(entries)[None]
    return mx.where(masked, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _softcapped_attention(
    q: mx.array, keys: mx.array, values: mx.array, masked: mx.array | str | None, spec: AttentionSpec
) -> mx.array:
    """Attend with soft-capped scores (Gemma 2, arXiv:2408.00118); MLX has no fused form."""
    assert spec.softcap is not None
    assert spec.sinks is None, "softcap and sinks together are not supported"
    batch, heads, length, dim = q.shape
    # The query heads of a K/V head stand together, so that K and V (B, Hkv, 1, S, D) are broadcast, not repeated.
    grouped = (q * spec.scale).reshape(batch, spec.kv_heads, heads // spec.kv_heads, length, dim)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2)  # (B, Hkv, H / Hkv, T, keys)
    scores = apply_mask(mx.tanh(scores / spec.softcap) * spec.softcap, masked)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(batch, heads, length, dim)


def attention(q: mx.array, keys: mx.array, values: mx.array, spec: AttentionSpec, begin: int = 0) -> mx.array:
    """Attend with the queries of the last positions (B, H, T, D) over K/V (B, Hkv, S, D) -> (B, H, T, D).

    begin: position of the first key.
    """
    length = q.shape[2]
    entries = keys.shape[2]
    masked = sdpa_mask(length, entries, spec, begin)
    size = _few(length, spec)
    if 1 < size < length:
        return _attention_in_pieces(q, keys, values, spec, begin, size)
    kernel = _kernel(q, entries, masked, spec)
    if kernel == "pieces":
        size = max(1, length * SCORES[mx.default_device().type] // _score_bytes(q, entries))
        return _attention_in_pieces(q, keys, values, spec, begin, size, wait=True)
    if kernel == "forced":
        return mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=spec.scale, mask=masked, sinks=spec.sinks, force_fused=True
        )
    if spec.softcap is not None:
        return _softcapped_attention(q, keys, values, masked, spec)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=spec.scale, mask=masked, sinks=spec.sinks)


def _few(length: int, spec: AttentionSpec) -> int:
    """Return the queries that Metal's kernels for few ones take at once; `length` where they are not for these.

    Draft tokens are verified by them: kernels for many queries do not divide the entries among threadgroups.
    """
    if length > _VECTOR_ROWS or spec.softcap is not None or spec.head_dim not in _VECTOR_SIZES:
        return length
    if mx.default_device().type == mx.DeviceType.cpu or not mx.metal.is_available():
        return length
    few = min(_VECTOR, _VECTOR_ROWS * spec.kv_heads // spec.heads)
    return few if few > 1 else length


def _score_bytes(q: mx.array, entries: int) -> int:
    """Return the bytes of the scores of queries (B, H, T, D) with so many entries."""
    batch, heads, length, _ = q.shape
    return batch * heads * length * entries * q.itemsize


def _kernel(
    q: mx.array, entries: int, masked: mx.array | str | None, spec: AttentionSpec
) -> Literal["usual", "forced", "pieces"]:
    """Return the kernel that bounds scores by SCORES: MLX's choice, a fused one by force, or any on a few queries.

    q: queries (B, H, T, D).
    entries: that they attend to.
    masked: their mask.
    """
    length, dim = q.shape[2:]
    device = mx.default_device().type
    if length <= _VECTOR or _score_bytes(q, entries) <= SCORES[device]:
        return "usual"
    if device == mx.DeviceType.cpu or spec.softcap is not None:
        return "pieces"
    if mx.metal.is_available():
        if dim in FUSED:  # keeps no scores
            return "usual"
        return "forced" if dim in FORCED else "pieces"
    if dim <= max(FUSED) and not isinstance(masked, mx.array):
        return "usual"
    return "pieces"


def _attention_in_pieces(
    q: mx.array, keys: mx.array, values: mx.array, spec: AttentionSpec, first: int, size: int, wait: bool = False
) -> mx.array:
    """Attend with `size` queries at once. As `attention`.

    first: position of the first key.
    wait: evaluate each piece; MLX allocates what it queues, so that pieces in flight would hold their scores together.
    """
    length = q.shape[2]
    entries = keys.shape[2]
    outs = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        # This piece sees the entries up to its last query, from the first that its first query sees.
        seen = entries - length + end
        start = max(0, spec.first_seen(first + seen - (end - begin)) - first)
        visible = slice(start, seen)
        out = attention(q[:, :, begin:end], keys[:, :, visible], values[:, :, visible], spec, first + start)
        if wait:
            mx.eval(out)
        outs.append(out)
    return mx.concatenate(outs, axis=2)


def rotate_heads(x: mx.array, rope: Rope, offset: int | mx.array) -> mx.array:
    """See `Ops`. offset: one, or one per row (B,)."""
    if rope.amplitude != 1.0:
        # YaRN scales the rotated dimensions only (arXiv:2309.00071).
        scaled = [x[..., : rope.dims] * rope.amplitude]
        if rope.dims < x.shape[-1]:
            scaled.append(x[..., rope.dims :])
        x = mx.concatenate(scaled, axis=-1)
    return mx.fast.rope(x, rope.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=rope.periods)


def attend_heads(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
    _phase: Phase | None = None,
) -> mx.array:
    """See `Ops`. Both phases attend alike here."""
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask, sinks=sinks)
