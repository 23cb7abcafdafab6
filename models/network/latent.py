"""Attention over latents (MLA): weights, and projections to and from them. See `runtime.ops.LatentWeights`."""

from functools import lru_cache

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig, LatentConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import latent as tensors_of
from headrace.models.network.tensors import latent_heads
from headrace.runtime.ops import LatentWeights, Ops, Projections, Weight


def read_latent(
    config: DecoderConfig, parameters: Parameters, prefix: str, latent: LatentConfig
) -> tuple[LatentWeights, list[Weight], Weight]:
    """Return a layer's weights, the projections of its input, and the one out of attention.

    Its input is projected to queries or their latent, then to an entry.
    """
    *queries, entries, embed_q, unembed_out, output = tensors_of(config, latent)
    heads = config.heads
    at = f"{prefix}.self_attn"
    turned = mx.concatenate([mx.arange(0, latent.rotated, 2), mx.arange(1, latent.rotated, 2)])
    each = mx.concatenate([latent.other + turned, mx.arange(latent.other)])
    query = (mx.arange(heads)[:, None] * (latent.rotated + latent.other) + each).flatten()
    entry = mx.concatenate([latent.size + turned, mx.arange(latent.size)])
    rows = queries[0].rows
    order = mx.concatenate([mx.arange(rows) if latent.queries else query, rows + entry])
    joined = latent_heads(config, latent)
    embed, unembed = parameters.halves_of_heads(prefix, joined, embed_q, unembed_out, heads)
    weights = LatentWeights(
        q_norm=parameters.vector(f"{at}.q_a_layernorm.weight", latent.queries) if latent.queries else None,
        q=parameters.fused(prefix, queries[1:], query)[0] if latent.queries else None,
        norm=parameters.vector(f"{at}.kv_a_layernorm.weight", latent.size),
        embed=embed,
        unembed=unembed,
        eps=latent.eps,
    )
    inputs = parameters.fused(prefix, [queries[0], entries], order)
    return weights, inputs, parameters.tensor(prefix, output)


def absorbed(ops: Ops, projected: Projections, latent: LatentWeights, heads: int) -> list[mx.array]:
    """Return queries (1, N, H * (R + L)), keys and values (1, N, R + L) of projected rows."""
    whole = projected if isinstance(projected, mx.array) else mx.concatenate(projected, axis=-1)
    size = latent.latent
    other = latent.embed.columns
    rotated = latent.q.rows // heads - other if latent.q is not None else _rotated(whole, latent, heads)
    entry = size + rotated
    q, key, value = mx.split(whole, [whole.shape[-1] - entry, whole.shape[-1] - size], axis=-1)
    if latent.q is not None and latent.q_norm is not None:
        q = ops.linear(ops.rms_norm(q, latent.q_norm, latent.eps), latent.q)
    rows = whole.shape[1]
    q = q.reshape(rows * heads, rotated + other)
    inner = ops.expert_linear(q[:, rotated:], _heads(rows, heads), latent.embed, heads)  # (N, H, 1, L)
    q = mx.concatenate([q[:, :rotated], inner.reshape(rows * heads, size)], axis=-1).reshape(1, rows, -1)
    new_entries = mx.concatenate([key, ops.rms_norm(value, latent.norm, latent.eps)], axis=-1)  # (1, N, R + L)
    return [q, new_entries, new_entries]


def values_of(ops: Ops, attended: mx.array, latent: LatentWeights, heads: int) -> mx.array:
    """Return the heads' values (1, N, H * V) of what attention returns, (1, N, H * (R + L))."""
    rows = attended.shape[1]
    inner = attended.reshape(rows * heads, -1)[:, -latent.latent :]
    return ops.expert_linear(inner, _heads(rows, heads), latent.unembed, heads).reshape(1, rows, -1)


def _rotated(projected: mx.array, latent: LatentWeights, heads: int) -> int:
    """Return R of queries that are projected at once, with rows of H * (N + R) + R + L."""
    return (int(projected.shape[-1]) - latent.latent - heads * latent.embed.columns) // (heads + 1)


@lru_cache(maxsize=16)
def _heads(rows: int, heads: int) -> mx.array:
    """Return the head of every row of queries (N * H, 1), the same for all layers."""
    return mx.array([[head] for head in range(heads)] * rows, mx.uint32)
