"""Configuration of headrace's decoder, which `read.decoder_config` makes and `models.network` reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headrace.runtime.ops import MixerSizes

Activation = Literal["silu", "gelu", "clamped", "xielu", "relu2", "tanh_gelu", "erf_gelu"]
GATED: tuple[Activation, ...] = ("silu", "gelu", "clamped")


@dataclass(frozen=True, slots=True)
class NormNames:
    """Modules of a layer's norms, before and after attention and feed-forward; None: no norm there."""

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of a family's layers that no config.json states."""

    norms: NormNames = NormNames()
    activation: Activation = "silu"
    # Each head by itself, or all of them together; without weights: "unit" each head, "turned_unit" each head that
    # turns; "layer": LayerNorms of each head, with weights of its own.
    qk_norm: Literal["head", "heads", "unit", "turned_unit", "layer"] | None = None
    by_kv_head: bool = False  # projections into attention are stored as one, the rows of each K/V head together
    interleaved: bool = False  # RoPE turns neighbouring dimensions instead of halves
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False  # LayerNorms add a bias
    norm_weights: bool = True  # the norms of layers and the last one have weights
    last_norm_whole: bool = False  # the last norm is stored as it is, whatever `norm_weight_offset`
    parallel: bool = False  # attention and feed-forward have the same input
    mixes_with_attention: bool = False  # recurrent state in every layer, next to attention
    norm_last: bool = False  # queries and keys are normalized after the rotation
    v_norm: bool = False  # values are normalized, without weights
    scaled: bool = False  # a factor multiplies every layer's output, if the checkpoint has it
    mixer_norms: NormNames | None = None  # of layers with recurrent state alone, if they differ
    # Attention's heads are multiplied by gates, stored with the queries or as a module of their own: one for each
    # number, or one for each head, as a sigmoid or as a softplus.
    gates: Literal["joined", "apart", "head_sigmoids", "head_softplus"] | None = None

    def norms_of(self, attends: bool) -> NormNames:
        """Return the norms of a layer with attention, or with recurrent state alone."""
        return self.norms if attends else self.mixer_norms or self.norms

    @property
    def adds_experts(self) -> bool:
        """True if the stream that experts normalize is, as it is, what their output is added to."""
        return self.norm == "rms" and not self.parallel and self.norms.after_mlp is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Projections into a feed-forward: no gate for an activation that gates nothing."""
        return ("gate_proj", "up_proj") if self.activation in GATED else ("up_proj",)


@dataclass(frozen=True, slots=True, eq=False)
class RopeConfig:
    """Rotation of one kind of layer: base frequency, and the checkpoint's scaling section.

    share: rotated part of a head.
    backwards: turned by negative angles.
    Compared by identity: layers of one kind share one object.
    """

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0
    backwards: bool = False

    @property
    def changes(self) -> bool:
        """True if long sequences turn by other factors (LongRoPE)."""
        scaling = self.scaling or {}
        return self.kind == "longrope" and scaling.get("short_factor") != scaling.get("long_factor")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward of `count` experts of `size`, `active` of them per token; see `runtime.ops.Mixture`.

    Modules below the feed-forward: router, stacked (the stacks of experts), each (a single stored expert, with `{}` for
    its number), shared_at (the expert that all tokens use, of size `shared`; 0 without), shared_gate (see
    `LayerWeights.down_gate`).

    correction: tensor there.
    correction_lost: conversions may lack it in all layers.
    branch: added to the layer's dense feed-forward, each after a norm of its own (Gemma 4).
    best, shares_first: as in `Mixture`.
    limit: bound of the experts' activations, 0 without (Step 3.5).
    band: see `Mixture`.
    excludes: experts of groups that are left out rank last, also after negative ranks (Ling 3).
    shared_scale: factor of the shared expert, next to attention (Command A+).
    """

    count: int
    active: int
    size: int
    normalized: bool
    router: str = "gate"
    stacked: str = "switch_mlp"
    each: str = "experts.{}"
    sigmoid: bool = False
    correction: str | None = None
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    shared: int = 0
    shared_at: str = "shared_experts"
    shared_gate: str | None = None
    branch: bool = False
    best: int = 2
    shares_first: bool = False
    correction_lost: bool = False
    limit: float = 0.0
    excludes: bool = False
    band: float = 0.0
    shared_scale: float = 1.0


ExpertLayers = list[ExpertsConfig | None]
"""Experts of each layer; None: a dense feed-forward."""


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """A layer's mixer; see `runtime.ops.MixerSpec`.

    eps: of its own norm.
    steps: least and most step size.
    norm_parts: parts that are normalized by themselves, with "ssm"; 0: no norm.
    by_key_head: "delta" has its projections joined, with the rows of each key head together (Qwen3-Next).
    apart: all projections and convolutions are stored apart (OLMo hybrid, Kimi Linear).
    rank: size of the first of two products that lead to gates and to decays, with "kda"; 0: one product each.
    decay_bound: see `MixerSpec.bound`.
    """

    sizes: "MixerSizes"
    eps: float
    steps: tuple[float, float] = (0.0, float("inf"))
    by_key_head: bool = False
    norm_parts: int = 1
    apart: bool = False
    most_beta: float = 1.0
    rank: int = 0
    decay_bound: float = 0.0

    @property
    def fits(self) -> bool:
        """True if the kernels run it."""
        sizes = self.sizes
        recurs = sizes.key_dim % 16 == 0 and sizes.key_heads > 0 and sizes.heads % sizes.key_heads == 0
        parts = not self.norm_parts or sizes.inner % self.norm_parts == 0
        return sizes.width <= 16 and parts and (sizes.kind == "conv" or recurs)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes. queries: of the queries' latent, 0 without. rotated, other: parts of a query's head. eps: of the norms."""

    queries: int
    size: int
    rotated: int
    other: int
    value: int
    eps: float

    @property
    def head_dim(self) -> int:
        """Size of an entry's key and value."""
        return self.rotated + self.size


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Sizes of an indexer, whose scores choose the entries that a query attends to (DeepSeek V3.2, MiniMax M3).

    heads, head_dim: of its queries; keys have one head.
    chosen: entries that a query attends to, at most.
    interleaved: its rotation turns neighbouring dimensions instead of halves.
    shared: the layer attends to the entries that the last layer before it with an indexer of its own has chosen.
    block: entries that are chosen together, by a head of the indexer for each K/V head; 1: single latents.
    local: blocks that are always chosen, a query's own the last of them.
    """

    heads: int
    head_dim: int
    chosen: int
    interleaved: bool = False
    shared: bool = False
    block: int = 1
    local: int = 0


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties that vary by layer: rotation (None: no position information), attention window and experts.

    mixer: recurrent mixing, in place of attention unless the layer `attends`. A layer may have neither.
    feeds: it has a feed-forward.
    heads, kv_heads, head_dim, inner (size of the feed-forward): 0 for those of the `DecoderConfig`.
    source: layer whose K/V this one reads, None for its own.
    projects, growth, chunked: see `AttentionSpec`.
    limit: bound of the dense feed-forward's activations, and of a shared expert's; 0 without.
    indexer: None if queries attend to all entries.
    sinks: a learned score per head in the softmax (GPT-OSS).
    value_dim: size of a value, if it is less than a key's (MiMo V2); 0: the same. It is stored with zeros after it.
    """

    rope: RopeConfig | None
    window: int | None = None
    experts: ExpertsConfig | None = None
    mixer: MixerConfig | None = None
    attends: bool = True
    feeds: bool = True
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0
    source: int | None = None
    projects: Literal["q", "qk", "qkv"] = "qkv"
    growth: tuple[float, int, int] | None = None
    chunked: bool = False
    indexer: IndexerConfig | None = None
    limit: float = 0.0
    sinks: bool = False
    value_dim: int = 0

    @property
    def appends(self) -> bool:
        """True if it has K/V or recurrent state of its own."""
        return self.source is None and (self.attends or self.mixer is not None)

    @property
    def own_indexer(self) -> IndexerConfig | None:
        """The indexer, unless it is an earlier layer's."""
        return None if self.indexer is None or self.indexer.shared else self.indexer


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and variants of a decoder-only transformer. Sizes are in elements.

    norm_eps: of the norms of the residual stream, which is stored divided by Granite's `residual_multiplier`.
    head_eps: of the norms of queries and keys; None: the same.
    embedding_eps: of a norm of embeddings, without weights, before they are scaled; None: no norm.
    branch_scale: factor of the norms after attention and feed-forward.
    qkv_bound: bound of queries, keys and values in size; None: no bound (DBRX).
    positions: rows of a table of learned positions, which are added to embeddings; 0 without.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    tied_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    family: Family = field(default_factory=Family)
    norm_weight_offset: float = 0.0  # Gemma and Qwen 3.5 store norm weights minus one
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    embedding_scale_in_bfloat16: bool = False  # Gemma 3 was trained with the rounded factor
    attention_softcap: float | None = None
    latent: LatentConfig | None = None  # then K/V are of one head, of latents
    logit_softcap: float | None = None
    input_size: int = 0  # of each layer's own input of a token, from a table of `input_vocab` rows
    input_vocab: int = 0
    head_eps: float | None = None
    embedding_eps: float | None = None
    branch_scale: float = 1.0
    qkv_bound: float | None = None
    positions: int = 0
    biased: frozenset[str] = frozenset()  # modules with a bias, below a layer
    value_scale: float = 1.0  # factor of values that are smaller than keys

    @property
    def plain(self) -> bool:
        """True if only sizes of prepared weights matter to the making of layers."""
        return not (self.latent or self.input_size or any(layer.experts or layer.mixer for layer in self.layers))

    @property
    def appending(self) -> int:
        """Layers up to the last that has K/V or recurrent state of its own."""
        return max(i for i, layer in enumerate(self.layers) if layer.appends) + 1

    def query_heads(self, layer: LayerConfig) -> int:
        """Return a layer's query heads."""
        return layer.heads or self.heads

    def heads_of(self, layer: LayerConfig) -> tuple[int, int]:
        """Return a layer's K/V heads and their size."""
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    def value_size(self, layer: LayerConfig) -> int:
        """Return the size of a layer's values, as they are projected."""
        return layer.value_dim or self.heads_of(layer)[1]

    def stored_heads(self, layer: LayerConfig) -> tuple[int, int]:
        """Return the heads of a layer's K and V as stored, and their size.

        An indexer's latents are stored once, half as K and half as V; see `runtime.ops.indexed`.
        """
        heads, size = self.heads_of(layer)
        if self.latent is not None and layer.indexer is not None:
            size //= 2
        return heads, size


def joint_norms(family: Family, layer: LayerConfig) -> int:
    """Return the norms over all heads of a layer: of queries and keys together, and of a Mamba mixer."""
    mixer = layer.mixer
    mamba = mixer is not None and mixer.sizes.kind == "ssm" and mixer.norm_parts == 1
    return int(layer.attends and family.qk_norm == "heads") + int(mamba)
