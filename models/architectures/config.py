"""Configuration of headrace's decoder, which `read.decoder_config` makes and `models.network` reads.

A new field has its value in a family's file and its use in `models.network`: in `tensors.py` if it changes matrices, in
`decoder.py` and `layers.py` (or the files that it calls) otherwise. Defaults are those of Llama, so that a family
states what differs. All records are frozen: families change them by `replace` in their `complete`.

Guard: tests/models/architectures/test_config.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.runtime.routing import Routing

if TYPE_CHECKING:
    from headrace.runtime.ops import MixerSizes

Activation = Literal[
    "silu", "gelu", "clamped", "xielu", "relu2", "tanh_gelu", "erf_gelu", "gated_erf_gelu", "gated_relu",
    "gated_relu2"
]  # fmt: skip
# Activations of a gate, which multiplies a second projection; the others have one projection in.
GATED: tuple[Activation, ...] = ("silu", "gelu", "clamped", "gated_erf_gelu", "gated_relu", "gated_relu2")


class NormNames(Struct, frozen=True):
    """Modules of a layer's norms, before and after attention and feed-forward; None: no norm there."""

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class Family(Struct, frozen=True):
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
    embedding_norm: bool = False  # embeddings have a norm, with weights
    mixer_norms: NormNames | None = None  # of layers with recurrent state alone, if they differ
    inner_norms: bool = False  # attention's heads together, and a feed-forward's inner values, are normalized (BitNet)
    # Attention's heads are multiplied by gates, stored with the queries or as a module of their own: one for each
    # number, or one for each head, as a sigmoid or as a softplus.
    gates: Literal["joined", "apart", "head_sigmoids", "head_softplus"] | None = None

    def norms_of(self, layer: "LayerConfig") -> NormNames:
        """Return the norms that a layer has: none around a half that it lacks."""
        names = self.norms
        if not layer.attends and self.mixer_norms is not None:
            names = self.mixer_norms
        if not layer.attends and layer.mixer is None:
            names = replace(names, attention=None, after_attention=None)
        if not layer.feeds:
            names = replace(names, mlp=None, after_mlp=None)
        return names

    @property
    def adds_experts(self) -> bool:
        """True if the stream that experts normalize is, as it is, what their output is added to."""
        return self.norm == "rms" and not self.parallel and self.norms.after_mlp is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Projections into a feed-forward: no gate for an activation that gates nothing."""
        return ("gate_proj", "up_proj") if self.activation in GATED else ("up_proj",)


class RopeConfig(Struct, frozen=True, eq=False):
    """Rotation of one kind of layer, as `models.network.rope` computes it.

    Compared by identity: layers of one kind share one object, and so one array of periods.
    """

    theta: float  # base of the frequencies
    kind: str = "default"  # of scaling; `read` lists the kinds that the decoder runs
    scaling: Mapping[str, Any] | None = None  # the checkpoint's section; None without scaling
    share: float = 1.0  # rotated part of a head
    backwards: bool = False  # turns by negative angles (nanochat)

    @property
    def changes(self) -> bool:
        """True if long sequences turn by other factors (LongRoPE)."""
        scaling = self.scaling or {}
        return self.kind == "longrope" and scaling.get("short_factor") != scaling.get("long_factor")


class ExpertsConfig(Routing, frozen=True, kw_only=True):
    """A layer's mixture of experts, from which `network.feed_forwards` makes a `runtime.ops.Mixture`.

    Names of modules are below the feed-forward, `mlp`.
    """

    size: int  # inner width of an expert
    router: str = "gate"  # module
    stacked: str = "switch_mlp"  # module of the stacks of all experts
    each: str = "experts.{}"  # module of a single stored expert, with {} for its number
    correction: str | None = None  # tensor that is added to scores for the choice alone
    shared: int = 0  # inner width of the expert that all tokens use; 0 without
    shared_at: str = "shared_experts"  # its module
    shared_gate: str | None = None  # module of its gate, see `LayerWeights.down_gate`
    weighs_both: bool = False  # the gate has two logits, whose softmax weighs the experts and the shared one (Klear)
    branch: bool = False  # added to the layer's dense feed-forward, each after a norm of its own (Gemma 4)
    correction_lost: bool = False  # conversions may lack the correction in all layers
    limit: float = 0.0  # bound of the experts' activations; 0 without (Step 3.5)
    excludes: bool = False  # experts of groups that are left out rank last, also after negative ranks (Ling 3)
    shared_scale: float = 1.0  # factor of the shared expert (Command A+, Grok 2)
    latent: int = 0  # size of the experts' input and output, between two projections; 0: the hidden size (Kimi K3)
    latent_norm: bool = False  # the experts' sum is normalized before the second of them


ExpertLayers = list[ExpertsConfig | None]
"""Experts of each layer; None: a dense feed-forward."""


class MixerConfig(Struct, frozen=True):
    """Recurrent mixing of a layer, from which `network.mixers` makes a `runtime.ops.MixerSpec`."""

    sizes: "MixerSizes"  # its kind, too: "delta", "kda", "ssm", "conv" or "shift"
    eps: float  # of the mixer's own norm; unused by "conv" and "shift", which have none
    steps: tuple[float, float] = (0.0, float("inf"))  # least and largest step, "ssm" only
    by_key_head: bool = False  # "delta" with joined projections, the rows of each key head together (Qwen3-Next)
    norm_parts: int = 1  # parts that are normalized by themselves, "ssm" only; 0: no norm
    # All projections and convolutions are stored apart (OLMo hybrid, Kimi Linear). Those of queries, keys and values
    # may be stored as one (Kimi K3).
    apart: bool = False
    most_beta: float = 1.0  # factor of the sigmoid that makes beta
    rank: int = 0  # of two products that lead to gates and to decays, "kda" only; 0: one product each
    full_gate: bool = False  # gates have one product, whatever `rank`
    decay_bound: float = 0.0  # see `MixerSpec.bound`
    later: tuple["MixerSizes", ...] = ()  # further states of the layer, in order
    scan: "ScanConfig | None" = None  # Mamba: what stands between its convolution and its scan
    time_mix: "TimeMixConfig | None" = None  # RWKV-7

    @property
    def states(self) -> "tuple[MixerSizes, ...]":
        """Sizes of all states of the layer."""
        return self.sizes, *self.later

    @property
    def fits(self) -> bool:
        """True if the kernels run its first state: keys in whole registers of 16 numbers, and a short convolution.

        The kernels run further states ("scan", "wkv"), too; `runs` of their family's row checks the sizes.
        """
        sizes = self.sizes
        recurs = sizes.key_dim % 16 == 0 and sizes.key_heads > 0 and sizes.heads % sizes.key_heads == 0
        parts = not self.norm_parts or sizes.inner % self.norm_parts == 0
        return sizes.width <= 16 and parts and (sizes.kind in ("conv", "shift") or recurs)


class ScanConfig(Struct, frozen=True):
    """Products between the convolution of a Mamba layer and its scan."""

    rank: int  # of the two products that lead to steps
    norm_eps: float | None  # of norms of steps, B and C, without weights; None: no norms (Falcon Mamba has some)


class TimeMixConfig(Struct, frozen=True):
    """Ranks of the products of an RWKV-7 layer that lead from its input to numbers of each channel."""

    decay: int
    rate: int  # of in-context learning
    gate: int
    value: int  # to the share of the first layer's values; 0 in that layer

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks by the letters of the modules' names."""
        ranks = {"w": self.decay, "a": self.rate, "g": self.gate, "v": self.value}
        return {letter: rank for letter, rank in ranks.items() if rank}


class LatentConfig(Struct, frozen=True):
    """Sizes of attention over latents (MLA); see `models.network.latent`."""

    queries: int  # the queries' latent; 0: queries are projected from the layer's input
    size: int  # the latent of keys and values
    rotated: int  # part of a head that turns, one for all keys
    other: int  # the other part of a query's head
    value: int  # a head's value
    eps: float  # of the norms of both latents

    @property
    def head_dim(self) -> int:
        """Size of an entry's key and value."""
        return self.rotated + self.size


class IndexerConfig(Struct, frozen=True):
    """Sizes of an indexer, whose scores choose the entries that a query attends to (DeepSeek V3.2, MiniMax M3)."""

    heads: int  # of its queries; keys have one head
    head_dim: int
    chosen: int  # entries that a query attends to, at most
    interleaved: bool = False  # its rotation turns neighbouring dimensions instead of halves
    shared: bool = False  # the layer uses the choice of the last layer before it with an indexer of its own
    block: int = 1  # entries that are chosen together, by a head of the indexer for each K/V head; 1: single latents
    local: int = 0  # blocks that are always chosen, a query's own the last of them


class AltUpConfig(Struct, frozen=True):
    """Alternating updates of several residual streams; see `models.network.altup_decoder`.

    streams: their number.
    rank: of the low-rank product next to attention.
    bound: of coefficients in size; None: no bound.
    """

    streams: int
    rank: int
    bound: float | None


class LayerConfig(Struct, frozen=True):
    """Properties that vary by layer. 0 `heads`, `kv_heads`, `head_dim` and `inner` are those of the `DecoderConfig`."""

    rope: RopeConfig | None  # None: attention has no position information
    window: int | None = None  # positions that a query sees, its own included; None: all before it
    experts: ExpertsConfig | None = None  # None: the feed-forward is dense
    mixer: MixerConfig | None = None  # recurrent mixing, in place of attention unless the layer `attends`
    attends: bool = True  # a layer may neither attend nor have a mixer
    feeds: bool = True  # it has a feed-forward
    heads: int = 0  # query heads
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0  # width of the dense feed-forward
    source: int | None = None  # layer whose K/V this one reads; None: its own
    projects: Literal["q", "qk", "qkv"] = "qkv"  # see `AttentionSpec`
    growth: tuple[float, int, int] | None = None  # of queries by position, see `AttentionSpec`
    chunked: bool = False  # a query sees the positions since the last multiple of `window`
    indexer: IndexerConfig | None = None  # None: queries attend to all entries
    limit: float = 0.0  # bound of the activations of the dense feed-forward or shared expert; 0 without
    sinks: bool = False  # a learned score for each head in the softmax (GPT-OSS)
    value_dim: int = 0  # size of a value, if less than a key's (MiMo V2): it is stored with zeros after it
    cutoff: float | None = None  # see `runtime.ops.SparseGelu` (Gemma 3n); None: the family's activation

    @property
    def appends(self) -> bool:
        """True if it has K/V or recurrent state of its own."""
        return self.source is None and (self.attends or self.mixer is not None)

    @property
    def own_indexer(self) -> IndexerConfig | None:
        """The indexer, unless it is an earlier layer's."""
        return None if self.indexer is None or self.indexer.shared else self.indexer


class DecoderConfig(Struct, frozen=True):
    """Shapes and variants of a decoder-only transformer. Sizes are in elements."""

    architecture: str  # model_type
    hidden_size: int
    intermediate_size: int  # inner width of dense feed-forwards
    heads: int  # query heads
    kv_heads: int  # 1 with latents
    head_dim: int  # size of a key, and with latents of a whole entry
    vocab_size: int
    context_length: int  # positions that the model was made for
    norm_eps: float  # of the residual stream's norms; divided with it, see `granite`
    tied_embeddings: bool  # the table is the output projection, too
    layers: tuple[LayerConfig, ...]
    attention_scale: float  # factor of scores
    family: Family = field(default_factory=Family)  # as this config changes it
    norm_weight_offset: float = 0.0  # Gemma and Qwen 3.5 store norm weights minus one
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    embedding_scale_in_bfloat16: bool = False  # Gemma 3 was trained with the rounded factor
    attention_softcap: float | None = None  # scores s are c tanh(s / c); None: as they are
    latent: LatentConfig | None = None  # then K/V are of one head, of latents
    logit_softcap: float | None = None  # as `attention_softcap`
    input_size: int = 0  # of each layer's own input of a token, from a table of `input_vocab` rows
    input_vocab: int = 0
    head_eps: float | None = None  # of the norms of queries and keys; None: `norm_eps`
    embedding_eps: float | None = None  # of a norm of embeddings, without weights, before their scale; None: no norm
    branch_scale: float = 1.0  # factor of the norms after attention and feed-forward
    branch_offsets: tuple[float, float] | None = None  # of those norms, in place of `norm_weight_offset`
    qkv_bound: float | None = None  # bound of queries, keys and values in size; None: no bound (DBRX)
    positions: int = 0  # rows of a table of learned positions, which are added to embeddings; 0 without
    biased: frozenset[str] = frozenset()  # modules with a bias, below a layer
    value_scale: float = 1.0  # factor of values that are smaller than keys
    altup: AltUpConfig | None = None  # several residual streams
    block_layers: int = 0  # layers of a block, whose residual sum later layers read; 0: no blocks (Kimi K3)
    soft_bounds: tuple[float, float | None] | None = None  # see `runtime.ops.SituGate`; None: the family's activation
    # Times that all stored layers run in a step, each time with K/V of their own (Nanbeige). `layers` has those of all
    # loops, one loop after the other, which may have other windows.
    loops: int = 1
    loop_norm: bool = False  # the last norm ends every loop, not the last one alone
    # Layers of the second loop attend to the entries of the first, too; gates of each head weigh both (IQuest Coder)
    loop_gates: bool = False

    @property
    def stored(self) -> tuple[LayerConfig, ...]:
        """The layers that a checkpoint has weights of: those of one loop."""
        return self.layers[: len(self.layers) // self.loops]

    @property
    def splits(self) -> tuple[Literal["tensor", "pipeline"], ...]:
        """Ways in which ranks can have parts of it.

        All need one residual stream, experts that read it as it is, and single states; a pipeline also layers that run
        once, and parts of layers norms of single heads.
        """
        latent = any(layer.experts is not None and layer.experts.latent for layer in self.layers)
        several_states = any(layer.mixer is not None and layer.mixer.later for layer in self.layers)
        if self.altup is not None or self.block_layers or latent or several_states:
            return ()
        if self.family.inner_norms:
            return ("pipeline",)
        return ("tensor",) if self.loops > 1 else ("tensor", "pipeline")

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
        """Return (number of K/V heads, their size) of a layer."""
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    def value_size(self, layer: LayerConfig) -> int:
        """Return the size of a layer's values, as they are projected."""
        _, size = self.heads_of(layer)
        return layer.value_dim or size

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
