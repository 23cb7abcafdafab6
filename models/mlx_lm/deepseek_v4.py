"""DeepSeek V4, in a class with the interface of mlx-lm's classes, of which 0.32 has V4.1 alone (docs/workarounds.md).

`load.classes` takes it by its row in `fixes`. What both versions have is mlx-lm's of V4.1: hyper-connections, sparse
attention and clamped experts. These parts of V4 are others:

- Every layer that pools tokens has entries of its own, a learned bias for each place in a group, and no rounded K/V.
- Groups of 4 overlap: an entry is pooled from its group and the one before. An indexer, with pooled keys of its own,
  chooses the entries that a query attends to. A query attends to the entries of all longer groups.
- Queries are normalized, head by head.
- The first layers choose experts by a table with a row for each token of the vocabulary.
- A layer's input is summed from the residual streams by its own weights, not by those of the layer before.

tests/parity/test_transformers.py compares its logits with those of transformers 5.24. Names of parameters are those of
the published files, which conversions for MLX keep.

Shapes: B sequences of T tokens, E the hidden size, S residual streams, D the size of a head, C entries.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.deepseek_v41 import (
    DeepseekV41SwiGLU,
    HyperConnection,
    SharedMLP,
    _append,
    _apply_rope,
    _collapse,
    _expand,
    _sparse_attention,
    _window_indices,
)
from mlx_lm.models.deepseek_v41 import LayerCache as V41Cache
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

_INDEXED = 4  # tokens in a group that overlaps with the one before, and whose entries an indexer chooses
_QUERIES = 32  # that attend together: each gathers the entries it attends to
_BLOCK = 128  # rows and columns of FP8 weights that share a scale
_GROUP = 32  # columns of FP4 weights that share a scale, and of both in MLX's formats
_SCORES: Mapping[str, Callable[[mx.array], mx.array]] = {
    "sqrtsoftplus": lambda logits: mx.sqrt(nn.softplus(logits)),
    "sigmoid": mx.sigmoid,
    "softmax": partial(mx.softmax, axis=-1),
}
# Published names, or their beginnings -> names here
_TOP = {
    "embed.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
    "hc_head_": "model.hc_head.",
    "layers.": "model.layers.",
}
_PARTS = {
    ".gate.bias": ".gate.e_score_correction_bias",
    ".attn.norm.": ".attn.kv_norm.",  # as transformers writes it, and the next line
    ".hc_head.hc_": ".hc_head.",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
    ".shared_experts.w1.": ".shared_experts.gate_proj.",
    ".shared_experts.w2.": ".shared_experts.down_proj.",
    ".shared_experts.w3.": ".shared_experts.up_proj.",
}
# layers.3.ffn.experts.17.w1.weight: the feed-forward, the expert, its matrix, the part of it
_EXPERT = re.compile(r"(.+\.ffn)\.experts\.(\d{1,9})\.(w[123])\.(weight|scales)")
_FP8 = (".wq_a", ".wq_b", ".wkv", ".wo_a", ".wo_b", ".gate_proj", ".up_proj", ".down_proj")  # published so
_EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc]
    """Keys of config.json, with the defaults of transformers."""

    model_type: str
    vocab_size: int = 129280
    hidden_size: int = 4096
    num_hidden_layers: int = 43
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-6
    # Attention
    num_attention_heads: int = 64
    head_dim: int = 512
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: list[int] = field(default_factory=list)  # tokens in a group, for each layer; 0: it has none
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    # Rotation: of layers without groups by `rope_theta`
    qk_rope_head_dim: int = 64
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: dict[str, Any] | None = None
    # Experts
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    num_hash_layers: int = 3
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hidden_act: str = "silu"
    # Residual streams
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Raise ValueError for settings that no published model has."""
        if len(self.compress_ratios) < self.num_hidden_layers:
            raise ValueError("compress_ratios has no entry for some layers")
        if any(type(size) is not int or size < 0 for size in self.compress_ratios):
            raise ValueError("compress_ratios must be whole numbers")
        if self.scoring_func not in _SCORES:
            raise ValueError(f"scoring_func is {self.scoring_func!r}")
        for key, only in (("n_shared_experts", 1), ("norm_topk_prob", True), ("hidden_act", "silu")):
            if getattr(self, key) != only:
                raise ValueError(f"{key} must be {only!r}, not {getattr(self, key)!r}")
        scaling = self.rope_scaling or {"type": "default"}
        if (scaling.get("rope_type") or scaling.get("type")) not in ("default", "yarn"):
            raise ValueError("rope_scaling must be of the type yarn")
        if scaling.get("attention_factor", 1.0) != 1.0 or not scaling.get("truncate", True):
            raise ValueError("rope_scaling has an attention_factor, or bounds that are not truncated")


class LayerCache(V41Cache):  # type: ignore[misc]
    """The cache of a layer: the latents of the last tokens, entries pooled from groups, and their index keys.

    The window is kept as in V4.1's cache, the rest by the layer's compressors.

    pooled, index: the state of a `Compressor`, which see.
    chosen: tokens whose entries a query attends to at most, by the name of the array; `costs` reads it.
    """

    def __init__(self, window_size: int, chosen: int | None) -> None:
        self.window_size = window_size
        self.chosen = {"pooled.entries": chosen} if chosen is not None else {}
        self.offset = 0
        self.window: mx.array | None = None  # (B, tokens, D)
        self.pooled: dict[str, mx.array] = {}
        self.index: dict[str, mx.array] = {}

    @property
    def state(self) -> list[mx.array]:
        """Return all arrays."""
        arrays = [*self.pooled.values(), *self.index.values()]
        if self.window is not None:
            arrays.append(self.window)
        return arrays

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.state)


class Compressor(nn.Module):  # type: ignore[misc]
    """An entry of `dim` numbers for each group of tokens: their means, with learned weights for each number.

    The state of a sequence is a mapping: `entries` (B, C, dim) of closed groups; `rows` and `gates`, projections of the
    tokens whose group is still open. If groups overlap, those of the last closed group stand before them.
    """

    def __init__(self, args: ModelArgs, ratio: int, dim: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.rope_dim = args.qk_rope_head_dim
        self.overlaps = ratio == _INDEXED
        # Projections of overlapping groups have two halves: for the next group's entry, and for their own.
        width = 2 * dim if self.overlaps else dim
        self.wkv = nn.Linear(args.hidden_size, width, bias=False)
        self.wgate = nn.Linear(args.hidden_size, width, bias=False)
        self.ape = mx.zeros((ratio, width))
        self.norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, state: dict[str, mx.array], rope: YarnRoPE) -> mx.array | None:
        """Add tokens x (B, T, E) to the state, and return its entries; None before the first group is closed."""
        rows = _append(state.get("rows"), self.wkv(x))
        gates = _append(state.get("gates"), self.wgate(x))
        entries = state.get("entries")
        closed = 0
        if entries is not None:
            closed = int(entries.shape[1])
        before = self.ratio if self.overlaps and closed else 0  # rows of the last closed group
        count = (rows.shape[1] - before) // self.ratio
        if count:
            end = before + count * self.ratio
            new = self._pool(rows[:, :end], gates[:, :end], count)
            # A group has the position of its first token.
            new = _apply_rope(new, rope, rope_dim=self.rope_dim, offset=closed, scale=self.ratio)
            state["entries"] = _append(entries, new)
            start = end - self.ratio if self.overlaps else end
            rows = rows[:, start:]
            gates = gates[:, start:]
        state["rows"] = rows
        state["gates"] = gates
        return state.get("entries")

    def _pool(self, rows: mx.array, gates: mx.array, count: int) -> mx.array:
        """Return the entries (B, count, dim) of the last `count` groups. rows, gates: of whole groups."""
        groups = (rows.shape[0], -1, self.ratio, rows.shape[-1])
        gates = gates.reshape(groups).astype(mx.float32) + self.ape
        means = rows.reshape(groups).astype(mx.float32)
        if self.overlaps:
            gates = _with_group_before(gates, -mx.inf)[:, -count:]  # the first group has none: weights of 0
            means = _with_group_before(means, 0.0)[:, -count:]
        means = mx.sum(means * mx.softmax(gates, axis=2), axis=2)
        pooled: mx.array = self.norm(means.astype(rows.dtype))
        return pooled


def _with_group_before(groups: mx.array, filler: float) -> mx.array:
    """Return (B, G, 2 R, dim) of groups (B, G, R, 2 dim): first halves of the group before, second halves of its own.

    filler: in place of a group before the first one.
    """
    first, second = mx.split(groups, 2, axis=-1)
    none = mx.full((first.shape[0], 1, *first.shape[2:]), filler, first.dtype)
    return mx.concatenate([mx.concatenate([none, first[:, :-1]], axis=1), second], axis=2)


class Indexer(nn.Module):  # type: ignore[misc]
    """The choice of entries for each query, by scores of several small heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_heads = args.index_n_heads
        self.topk = args.index_topk
        self.rope_dim = args.qk_rope_head_dim
        self.scale = (args.index_head_dim * args.index_n_heads) ** -0.5
        self.wq_b = nn.Linear(args.q_lora_rank, args.index_n_heads * args.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(args.hidden_size, args.index_n_heads, bias=False)
        self.compressor = Compressor(args, _INDEXED, args.index_head_dim)

    def __call__(
        self, x: mx.array, latent: mx.array, keys: mx.array, closed: mx.array, rope: YarnRoPE, offset: int
    ) -> mx.array:
        """Return the numbers (B, T, topk) of the entries with the highest scores, -1 for none.

        x: the layer's input (B, T, E).
        latent: of the queries (B, T, rank).
        keys: index keys of all entries (B, C, dim).
        closed: number of entries that each query sees (T,).
        rope, offset: rotation, and position of the first query.
        """
        queries = self.wq_b(latent).reshape(*x.shape[:2], self.num_heads, -1)
        queries = _apply_rope(queries, rope, rope_dim=self.rope_dim, offset=offset).astype(mx.float32)
        scores = mx.maximum(queries @ keys.astype(mx.float32)[:, None].swapaxes(-1, -2), 0.0)  # (B, T, heads, C)
        weights = self.weights_proj(x).astype(mx.float32) * self.scale
        scores = mx.sum(scores * weights[..., None], axis=2)
        scores = mx.where(mx.arange(keys.shape[1]) < closed[:, None], scores, -mx.inf)
        count = min(self.topk, int(keys.shape[1]))
        chosen = mx.argpartition(-scores, count - 1, axis=-1)[..., :count].astype(mx.int32)
        return mx.where(chosen < closed[:, None], chosen, -1)


class Attention(nn.Module):  # type: ignore[misc]
    """Attention of all heads to one latent a token, within a window, and to pooled entries of all tokens."""

    def __init__(self, args: ModelArgs, ratio: int) -> None:
        super().__init__()
        self.num_heads = args.num_attention_heads
        self.rope_dim = args.qk_rope_head_dim
        self.eps = args.rms_norm_eps
        self.scale = args.head_dim**-0.5
        self.groups = args.o_groups
        self.ratio = ratio
        width = args.num_attention_heads * args.head_dim
        self.wq_a = nn.Linear(args.hidden_size, args.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(args.q_lora_rank, eps=args.rms_norm_eps)
        self.wq_b = nn.Linear(args.q_lora_rank, width, bias=False)
        self.wkv = nn.Linear(args.hidden_size, args.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self.wo_a = SwitchLinear(width // args.o_groups, args.o_lora_rank, args.o_groups, bias=False)
        self.wo_b = nn.Linear(args.o_groups * args.o_lora_rank, args.hidden_size, bias=False)
        self.attn_sink = mx.zeros((args.num_attention_heads,))
        self._group_ids = mx.arange(args.o_groups)[None]
        if ratio:
            self.compressor = Compressor(args, ratio, args.head_dim)
        if ratio == _INDEXED:
            self.indexer = Indexer(args)
        self.rope = _rope(args, ratio)

    def __call__(self, x: mx.array, cache: LayerCache) -> mx.array:
        """x: (B, T, E) -> (B, T, E)."""
        batch, length, _ = x.shape
        offset = cache.offset
        # Queries (B, T, heads, D), and the latents of the window, which are keys and values of all heads
        latent = self.q_norm(self.wq_a(x))
        queries = self.wq_b(latent).reshape(batch, length, self.num_heads, -1)
        queries = self._rotated(mx.fast.rms_norm(queries, None, self.eps), offset)
        rows = cache.update_window(self._rotated(self.kv_norm(self.wkv(x)), offset))
        near = _window_indices(previous=rows.shape[1] - length, length=length, window=cache.window_size)
        near = mx.broadcast_to(near, (batch, *near.shape))
        # Entries (B, C, D), and how many of them each query sees
        entries = None
        index_keys = None
        closed = mx.zeros((length,), mx.int32)
        if self.ratio:
            entries = self.compressor(x, cache.pooled, self.rope)
            closed = (offset + 1 + mx.arange(length)) // self.ratio
        if self.ratio == _INDEXED:
            index_keys = self.indexer.compressor(x, cache.index, self.rope)

        outputs = []
        for start in range(0, length, _QUERIES):
            part = slice(start, start + _QUERIES)
            keys = [rows]
            numbers = [near[:, part]]
            if entries is not None:
                keys.append(entries)
                if index_keys is None:
                    numbers.append(_all_seen(entries, closed[part]))
                else:
                    numbers.append(
                        self.indexer(x[:, part], latent[:, part], index_keys, closed[part], self.rope, offset + start)
                    )
            outputs.append(_sparse_attention(queries[:, part], keys, numbers, sinks=self.attn_sink, scale=self.scale))
        out = self._rotated(mx.concatenate(outputs, axis=1), offset, inverse=True)
        out = self.wo_a(out.reshape(batch * length, self.groups, 1, -1), self._group_ids)
        projected: mx.array = self.wo_b(out.reshape(batch, length, -1))
        return projected

    def _rotated(self, heads: mx.array, offset: int, *, inverse: bool = False) -> mx.array:
        rotated: mx.array = _apply_rope(heads, self.rope, rope_dim=self.rope_dim, offset=offset, inverse=inverse)
        return rotated


def _rope(args: ModelArgs, ratio: int) -> YarnRoPE:
    """Return the rotation of a layer with groups of `ratio` tokens: YaRN without its amplitude; 0: without scaling."""
    if not ratio:
        return YarnRoPE(args.qk_rope_head_dim, traditional=True, base=args.rope_theta)
    scaling = args.rope_scaling or {}
    return YarnRoPE(
        args.qk_rope_head_dim,
        traditional=True,
        base=args.compress_rope_theta,
        scaling_factor=float(scaling.get("factor") or 1.0),
        original_max_position_embeddings=int(
            scaling.get("original_max_position_embeddings") or args.max_position_embeddings
        ),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        mscale=0.0,
        mscale_all_dim=0.0,
    )


def _all_seen(entries: mx.array, closed: mx.array) -> mx.array:
    """Return the numbers (B, T, C) of all entries that each query sees, -1 for others. closed: see `Indexer`."""
    numbers = mx.arange(entries.shape[1])
    seen = mx.where(numbers < closed[:, None], numbers, -1)
    return mx.broadcast_to(seen, (entries.shape[0], *seen.shape))


class Router(nn.Module):  # type: ignore[misc]
    """The choice of experts: by corrected scores, or by a table of tokens. Scores are their shares in either case."""

    def __init__(self, args: ModelArgs, *, is_hashed: bool) -> None:
        super().__init__()
        self.top_k = args.num_experts_per_tok
        self.count = args.n_routed_experts
        self.scoring = args.scoring_func
        self.factor = args.routed_scaling_factor
        self.weight = mx.zeros((args.n_routed_experts, args.hidden_size))
        if is_hashed:
            self.tid2eid = mx.zeros((args.vocab_size, args.num_experts_per_tok), mx.int32)
        else:
            self.e_score_correction_bias = mx.zeros((args.n_routed_experts,))

    def __call__(self, x: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Return experts and shares (B, T, top_k) for x (B, T, E)."""
        scores = _SCORES[self.scoring](x.astype(mx.float32) @ self.weight.astype(mx.float32).T)
        if "tid2eid" in self:
            # Within bounds, whatever the file has: an index beyond the stack would read other memory.
            chosen = mx.clip(self.tid2eid[tokens], 0, self.count - 1).astype(mx.uint32)
        else:
            ranks = scores + self.e_score_correction_bias
            chosen = mx.argpartition(-ranks, self.top_k - 1, axis=-1)[..., : self.top_k]
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, shares / (mx.sum(shares, axis=-1, keepdims=True) + 1e-20) * self.factor


class Mixture(nn.Module):  # type: ignore[misc]
    """Chosen experts, and one that all tokens share."""

    def __init__(self, args: ModelArgs, *, is_hashed: bool) -> None:
        super().__init__()
        self.gate = Router(args, is_hashed=is_hashed)
        self.switch_mlp = SwitchGLU(
            args.hidden_size,
            args.moe_intermediate_size,
            args.n_routed_experts,
            activation=DeepseekV41SwiGLU(args.swiglu_limit),
        )
        self.shared_experts = SharedMLP(args)

    def __call__(self, x: mx.array, tokens: mx.array) -> mx.array:
        """x: (B, T, E) -> (B, T, E)."""
        chosen, shares = self.gate(x, tokens)
        routed = mx.sum(self.switch_mlp(x, chosen).astype(mx.float32) * shares[..., None], axis=-2)
        shared: mx.array = self.shared_experts(x)
        return (routed + shared.astype(mx.float32)).astype(x.dtype)


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and experts, each of which reads a sum of the residual streams, and adds its output to all of them."""

    def __init__(self, args: ModelArgs, number: int) -> None:
        super().__init__()
        self.attn = Attention(args, args.compress_ratios[number])
        self.ffn = Mixture(args, is_hashed=number < args.num_hash_layers)
        self.attn_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.attn_hc = HyperConnection(args)
        self.ffn_hc = HyperConnection(args)

    def __call__(self, streams: mx.array, tokens: mx.array, cache: LayerCache) -> mx.array:
        """streams: (B, T, S, E) -> (B, T, S, E)."""
        inward, outward, mixing = self.attn_hc(streams)
        out = self.attn(self.attn_norm(_collapse(streams, inward)), cache)
        streams = _expand(out, streams, outward, mixing)
        inward, outward, mixing = self.ffn_hc(streams)
        out = self.ffn(self.ffn_norm(_collapse(streams, inward)), tokens)
        expanded: mx.array = _expand(out, streams, outward, mixing)
        return expanded


class HyperHead(nn.Module):  # type: ignore[misc]
    """The sum of the last residual streams, by weights that are computed from them."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.eps = args.rms_norm_eps
        self.least = args.hc_eps
        self.fn = mx.zeros((args.hc_mult, args.hc_mult * args.hidden_size))
        self.base = mx.zeros((args.hc_mult,))
        self.scale = mx.ones((1,))

    def __call__(self, streams: mx.array) -> mx.array:
        """streams: (B, T, S, E) -> (B, T, E)."""
        flat = mx.fast.rms_norm(streams.astype(mx.float32).flatten(2), None, self.eps)
        weights = mx.sigmoid((flat @ self.fn.T) * self.scale + self.base) + self.least
        summed: mx.array = _collapse(streams, weights)
        return summed


class Body(nn.Module):  # type: ignore[misc]
    """The network without its output projection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.streams = args.hc_mult
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, number) for number in range(args.num_hidden_layers)]
        self.hc_head = HyperHead(args)
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache: list[LayerCache]) -> mx.array:
        """tokens: (B, T) -> (B, T, E)."""
        x = self.embed_tokens(tokens)[:, :, None]
        streams = mx.broadcast_to(x, (*tokens.shape, self.streams, x.shape[-1]))
        for layer, part in zip(self.layers, cache, strict=True):
            streams = layer(streams, tokens, part)
        out: mx.array = self.norm(self.hc_head(streams))
        return out


class Model(nn.Module):  # type: ignore[misc]
    """The model, as mlx-lm's loader and caches expect it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Body(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache: list[LayerCache] | None = None) -> mx.array:
        """tokens: (B, T) -> logits (B, T, V)."""
        logits: mx.array = self.lm_head(self.model(tokens, cache or self.make_cache()))
        return logits

    @property
    def layers(self) -> list[Layer]:
        layers: list[Layer] = self.model.layers
        return layers

    def make_cache(self) -> list[LayerCache]:
        """Return empty caches, one a layer."""
        chosen = self.args.index_topk * _INDEXED
        return [
            LayerCache(self.args.sliding_window, chosen if layer.attn.ratio == _INDEXED else None)
            for layer in self.layers
        ]

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """Return whether a parameter may be converted to half precision, by its name."""
        exact = (".attn_hc.", ".ffn_hc.", ".hc_head.", ".attn_sink", ".e_score_correction_bias", ".ape")
        return lambda name: not any(part in name for part in exact)

    def published_format(self, path: str, module: nn.Module) -> bool | dict[str, object]:
        """Return the format of a published module in MLX's terms, False for a plain one."""
        if not hasattr(module, "to_quantized"):
            return False
        if ".switch_mlp." in path:
            return {"group_size": _GROUP, "bits": 4, "mode": "mxfp4"}
        if path.endswith(_FP8) and ".compressor." not in path:
            return {"group_size": _GROUP, "bits": 8, "mode": "mxfp8"}
        return False

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the arrays under the names here: experts stacked, FP8 and FP4 packed as they are."""
        named: dict[str, mx.array] = {}
        experts: defaultdict[str, dict[int, mx.array]] = defaultdict(dict)
        for name, array in _unpublished(weights).items():
            match = _EXPERT.fullmatch(name)
            if match is None:
                named[name] = array
            else:
                owner, number, part, kind = match.groups()
                experts[f"{owner}.switch_mlp.{_EXPERT_PARTS[part]}.{kind}"][int(number)] = array
        for name, by_number in experts.items():
            named[name] = mx.stack([by_number[number] for number in sorted(by_number)])
        for name, array in named.items():
            if ".wo_a." in name and array.ndim == 2:  # a matrix for each group of heads
                named[name] = array.reshape(self.args.o_groups, -1, array.shape[-1])
            elif name.endswith(".tid2eid"):
                named[name] = array.astype(mx.int32)
        return named


def _unpublished(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the arrays by names here, but for single experts, with scales of MLX's formats; no prediction heads."""
    result: dict[str, mx.array] = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if name.startswith("mtp.") or (kind == "scale" and f"{module}.weight" in weights):
            continue
        scale = weights.get(f"{module}.scale") if kind == "weight" else None
        if scale is None:
            result[_name(name)] = array
        else:
            result[_name(name)] = array.view(mx.uint32)
            result[_name(f"{module}.scales")] = _scales(name, array, scale)
    return result


def _name(published: str) -> str:
    """Return the name here of a published tensor, or of one that has it already."""
    top = next((start for start in _TOP if published.startswith(start)), None)
    name = published
    if top is not None:
        name = _TOP[top] + published.removeprefix(top)
    for theirs, ours in _PARTS.items():
        name = name.replace(theirs, ours)
    return name


def _scales(name: str, weight: mx.array, scale: mx.array) -> mx.array:
    """Return a scale for each 32 columns of each row, of an FP4 weight (N, K / 2) or an FP8 one (N, K) in blocks.

    Raises ValueError for scales of another shape.
    """
    rows, columns = weight.shape
    if weight.dtype == mx.int8:  # FP4, two in a byte
        if scale.shape != (rows, 2 * columns // _GROUP):
            raise ValueError(f"{name} has scales of shape {scale.shape}")
        return scale
    if scale.shape != (-(-rows // _BLOCK), -(-columns // _BLOCK)):
        raise ValueError(f"{name} has scales of shape {scale.shape}")
    repeated = mx.repeat(mx.repeat(scale, _BLOCK, axis=0), _BLOCK // _GROUP, axis=1)
    return repeated[:rows, : columns // _GROUP]
