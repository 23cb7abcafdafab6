"""Attention over latents (MLA): weights, and projections to and from them. See `runtime.ops.LatentWeights`.

An entry of the cache is one head for all queries: a part that turns (R numbers), then a latent (L). Queries are
multiplied by the matrix that would make keys of latents, so that attention reads the latents themselves ("absorbed").
A checkpoint has the turning part of a head or an entry last; here it is first, and numbers that turn together are half
of it apart. `layers` explains the parameters of `read_latent` and `_read_indexer`.

Dimensions: N rows, H heads, R rotated part, P other part of a query's head, L latent, V a head's value; I heads and D
head size of an indexer.

Guard: tests/parity/test_mlx_lm_families.py.
"""

from functools import lru_cache

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig, LatentConfig, LayerConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import neighbours_apart
from headrace.models.network.tensors import indexer as indexer_tensors
from headrace.models.network.tensors import latent as tensors_of
from headrace.models.network.tensors import latent_heads
from headrace.runtime.ops import IndexerWeights, LatentWeights, Ops, Projections, Weight

_INDEX_EPS = 1e-6  # of the norm of an indexer's keys


def read_latent(
    config: DecoderConfig, parameters: Parameters, prefix: str, latent: LatentConfig, layer: LayerConfig
) -> tuple[LatentWeights, list[Weight], Weight]:
    """Return a layer's weights, the projections of its input, and the one out of attention.

    Its input is projected to queries or their latent, then to an entry; then to an indexer's weights and key, if any.
    """
    *queries, entries, embed_q, unembed_out, output = tensors_of(config, latent)
    heads = config.heads
    at = f"{prefix}.self_attn"

    # Stored rows in the order of the operations: of a query's head, of all heads, and of an entry.
    turned = mx.arange(latent.rotated)
    if config.family.interleaved:
        turned = neighbours_apart(latent.rotated)
    head = mx.concatenate([latent.other + turned, mx.arange(latent.other)])
    query = (mx.arange(heads)[:, None] * (latent.rotated + latent.other) + head).flatten()
    entry = mx.concatenate([latent.size + turned, mx.arange(latent.size)])
    rows = queries[0].rows
    stored = mx.arange(rows) if latent.queries else query
    order = mx.concatenate([stored, rows + entry])  # of the first projection of queries, then of entries

    q_norm = None
    q = None
    if latent.queries:
        q_norm = parameters.vector(f"{at}.q_a_layernorm.weight", latent.queries)
        [q] = parameters.fused(prefix, queries[1:], query)

    # The matrices that make keys and values of latents, a pair for each head
    joined = latent_heads(config, latent)
    embed, unembed = parameters.halves_of_heads(prefix, joined, embed_q, unembed_out, heads)
    of_indexer, indexer = _read_indexer(config, parameters, prefix, latent, layer)
    weights = LatentWeights(
        q_norm=q_norm,
        q=q,
        norm=parameters.vector(f"{at}.kv_a_layernorm.weight", latent.size),
        embed=embed,
        unembed=unembed,
        eps=latent.eps,
        indexer=indexer,
    )
    inputs = parameters.fused(prefix, [queries[0], entries], order)
    return weights, [*inputs, *of_indexer], parameters.tensor(prefix, output)


def _read_indexer(
    config: DecoderConfig, parameters: Parameters, prefix: str, latent: LatentConfig, layer: LayerConfig
) -> tuple[list[Weight], IndexerWeights | None]:
    """Return the projections of a layer's input to an indexer's weights and key, and its other weights, if any."""
    sizes = layer.own_indexer
    if sizes is None:
        return [], None
    queries, weights, key = indexer_tensors(config, layer)
    dims = mx.arange(sizes.head_dim)
    if sizes.interleaved:
        dims[: latent.rotated] = neighbours_apart(latent.rotated)
    query = (mx.arange(sizes.heads)[:, None] * sizes.head_dim + dims).flatten()
    norm, norm_bias = (
        parameters.vector(f"{prefix}.self_attn.indexer.k_norm.{part}", sizes.head_dim)[dims]
        for part in ("weight", "bias")
    )
    indexer = IndexerWeights(parameters.fused(prefix, [queries], query)[0], norm, norm_bias)
    return [parameters.tensor(prefix, weights), *parameters.fused(prefix, [key], dims)], indexer


def absorbed(ops: Ops, projected: Projections, latent: LatentWeights, heads: int) -> list[mx.array]:
    """Return queries (1, N, H * (R + L)), keys and values (1, N, R + L) of projected rows.

    With an indexer, return its queries (1, N, I * D), their weights (1, N, I) and keys (1, N, D) in place of values.
    """
    of_indexer: list[mx.array] = []
    if latent.indexer is not None:
        *projected, weights, index_key = projected
        index_key = ops.layer_norm(index_key, latent.indexer.norm, latent.indexer.norm_bias, _INDEX_EPS)
        of_indexer = [weights, index_key]

    # Split the row into queries, the turning part of the entry, and its latent.
    whole = mx.concatenate(projected, axis=-1)
    size = latent.latent
    other = latent.embed.columns
    if latent.q is not None:
        rotated = latent.q.rows // heads - other
    else:  # queries are projected at once: rows are of H * (P + R) + R + L, solved for R
        rotated = (int(whole.shape[-1]) - size - heads * other) // (heads + 1)
    entry = size + rotated
    q, key, value = mx.split(whole, [whole.shape[-1] - entry, whole.shape[-1] - size], axis=-1)
    if latent.q is not None and latent.q_norm is not None:
        q_latent = ops.rms_norm(q, latent.q_norm, latent.eps)
        q = ops.linear(q_latent, latent.q)
        if latent.indexer is not None:
            of_indexer.insert(0, ops.linear(q_latent, latent.indexer.queries))

    # Multiply the other part of each head, so that it can be compared with latents.
    rows = whole.shape[1]
    q = q.reshape(rows * heads, rotated + other)
    inner = ops.expert_linear(q[:, rotated:], _heads(rows, heads), latent.embed, heads)  # (N, H, 1, L)
    q = mx.concatenate([q[:, :rotated], inner.reshape(rows * heads, size)], axis=-1).reshape(1, rows, -1)
    new_entries = mx.concatenate([key, ops.rms_norm(value, latent.norm, latent.eps)], axis=-1)  # (1, N, R + L)
    return [q, new_entries, *(of_indexer or [new_entries])]


def values_of(ops: Ops, attended: mx.array, latent: LatentWeights, heads: int) -> mx.array:
    """Return the heads' values (1, N, H * V) of what attention returns, (1, N, H * (R + L))."""
    rows = attended.shape[1]
    inner = attended.reshape(rows * heads, -1)[:, -latent.latent :]
    return ops.expert_linear(inner, _heads(rows, heads), latent.unembed, heads).reshape(1, rows, -1)


@lru_cache(maxsize=16)
def _heads(rows: int, heads: int) -> mx.array:
    """Return the head of every row of queries (N * H, 1), the same for all layers."""
    return mx.array([[head] for head in range(heads)] * rows, mx.uint32)
