"""Table of the matrices of a layer, block by block. Loading, costs and division over ranks loop over it.

Names are those of `models.checkpoint.text_part`, below the layer. Each block is a function from the configuration to
its rows, in the order of computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from headrace.models.architectures.config import DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig, MixerConfig

Unit = Literal["inner", "heads", "head_stack", "kv_heads", "mixer"]
"""Units that ranks divide: numbers inside a feed-forward, heads of queries (also if they are stored as a stack, as its
first axis), heads of K/V, heads or channels of a mixer."""


_EXPERTS = "experts used"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix of a layer, or a stack of the experts' matrices."""

    name: str  # module below the layer
    rows: int  # outputs
    columns: int  # inputs
    rows_by: Unit | None = None  # ranks have some of the rows
    columns_by: Unit | None = None  # ranks have some of the columns
    whole: str = ""  # module that some checkpoints have instead: the rows of all tensors with this `whole`
    before_append: bool = False  # needed for the entry that a token appends to K/V or recurrent state
    title: str = ""  # in tables of costs, if not the end of its name
    part: str = "attention"  # of the network, in accounts of bytes
    count: int = 1  # experts
    active: int = 1  # of them, for each token
    single: str = ""  # module of a single stored expert, with {} for its number

    @property
    def is_divided(self) -> bool:
        """True if a rank has a part of it in tensor parallelism, False if every rank has all of it."""
        return self.rows_by is not None or self.columns_by is not None

    @property
    def product(self) -> str:
        """Name of the product that it is a part of: of all tensors with the same `whole`, which have one input."""
        return self.whole.removesuffix("_proj") or self.name

    @property
    def shown_name(self) -> str:
        """Name in tables of costs."""
        return self.title or self.name.rpartition(".")[2]


def layer_tensors(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return all matrices of a layer."""
    blocks: list[Sequence[Tensor]] = []
    if layer.attends:
        blocks.append(attention(config, layer) if config.latent is None else latent(config, config.latent))
    if layer.mixer is not None:
        blocks += [mixer_inputs(config, layer.mixer), mixer_gates(layer.mixer), [mixer_output(config, layer.mixer)]]
    blocks.append(feed_forward(config, layer))
    if layer.experts is not None:
        blocks += [[router(config, layer.experts)], expert_stacks(config, layer.experts)]
        if (gate := shared_gate(config, layer.experts)) is not None:
            blocks.append([gate])
    blocks.append(layer_input(config))
    return list(chain.from_iterable(blocks))


def attention(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return the projections into attention, then the one out of it."""
    kv_heads, head_dim = config.heads_of(layer)
    width = config.hidden_size
    queries = config.heads * head_dim
    entries = kv_heads * head_dim
    rows = {"q": queries * (2 if config.family.gated else 1), "k": entries, "v": entries}
    units: dict[str, Unit] = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    whole = "self_attn.qkv_proj"
    inputs = [
        Tensor(f"self_attn.{part}_proj", rows[part], width, rows_by=units[part], whole=whole, before_append=True)
        for part in layer.projects
    ]
    return [*inputs, Tensor("self_attn.o_proj", width, queries, columns_by="heads")]


def latent(config: DecoderConfig, sizes: LatentConfig) -> list[Tensor]:
    """Return the projections of attention over latents; those of each head count together."""
    at = "self_attn"
    width = config.hidden_size
    heads = config.heads
    query = heads * (sizes.rotated + sizes.other)

    def before(name: str, rows: int, columns: int, rows_by: Unit | None = "heads") -> Tensor:
        return Tensor(f"{at}.{name}", rows, columns, rows_by=rows_by, before_append=True)

    if sizes.queries:
        first = [before("q_a_proj", sizes.queries, width, None), before("q_b_proj", query, sizes.queries)]
    else:
        first = [before("q_proj", query, width)]
    return [
        *first,
        before("kv_a_proj_with_mqa", sizes.head_dim, width, None),
        before("embed_q", heads * sizes.size, sizes.other, "head_stack"),
        before("unembed_out", heads * sizes.value, sizes.size, "head_stack"),
        Tensor(f"{at}.o_proj", width, heads * sizes.value, columns_by="heads"),
    ]


def latent_heads(config: DecoderConfig, sizes: LatentConfig) -> Tensor:
    """Return the projection that some checkpoints have instead of `embed_q` and `unembed_out`: both of each head."""
    return Tensor("self_attn.kv_b_proj", config.heads * (sizes.other + sizes.value), sizes.size, rows_by="heads")


def mixer_inputs(config: DecoderConfig, mixer: MixerConfig) -> list[Tensor]:
    """Return the stored projections into a mixer."""
    sizes = mixer.sizes
    keys = mixer.sizes.key_heads * mixer.sizes.key_dim
    if mixer.apart:
        rows = {"q_proj": keys, "k_proj": keys, "v_proj": sizes.inner}
        if mixer.rank:
            rows |= {"g_a_proj": mixer.rank, "f_a_proj": mixer.rank, "b_proj": sizes.heads}
        else:
            rows |= {"g_proj": sizes.inner, "b_proj": sizes.heads, "a_proj": sizes.heads}
    elif mixer.by_key_head:
        rows = {"in_proj_qkvz": sizes.channels + sizes.inner, "in_proj_ba": 2 * sizes.heads}
    elif sizes.kind == "delta":
        rows = {
            "in_proj_qkv": sizes.channels,
            "in_proj_z": sizes.inner,
            "in_proj_b": sizes.heads,
            "in_proj_a": sizes.heads,
        }
    elif sizes.kind == "conv":
        rows = {"in_proj": 3 * sizes.inner}
    else:
        rows = {"in_proj": sizes.inner + sizes.channels + sizes.heads}
    width = config.hidden_size
    of_latents = ("g_a_proj", "f_a_proj")
    return [
        Tensor(
            f"mixer.{name}",
            count,
            width,
            rows_by=None if name in of_latents else "mixer",
            whole="mixer.in_proj",
            before_append=True,
        )
        for name, count in rows.items()
    ]


def mixer_gates(mixer: MixerConfig) -> list[Tensor]:
    """Return the second products to gates and decays, of a mixer that has two."""
    if not mixer.rank:
        return []
    rows = {"g_b_proj": mixer.sizes.inner, "f_b_proj": mixer.sizes.decays}
    return [
        Tensor(f"mixer.{name}", count, mixer.rank, rows_by="mixer", before_append=True) for name, count in rows.items()
    ]


def mixer_output(config: DecoderConfig, mixer: MixerConfig) -> Tensor:
    return Tensor("mixer.out_proj", config.hidden_size, mixer.sizes.inner, columns_by="mixer")


def feed_forward(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return the feed-forward that all tokens use: projections into it, and the one out of it; empty without."""
    experts = layer.experts
    if experts is None or experts.branch:
        inner = layer.inner or config.intermediate_size
        return _feed_forward(config, "mlp", inner) if layer.feeds else []
    at = f"mlp.{experts.shared_at}".rstrip(".")
    return _feed_forward(config, at, experts.shared, "shared ") if experts.shared else []


def _feed_forward(config: DecoderConfig, at: str, inner: int, kind: str = "") -> list[Tensor]:
    width = config.hidden_size
    whole = f"{at}.gate_up_proj"
    inputs = [
        Tensor(f"{at}.{name}", inner, width, rows_by="inner", whole=whole, title=kind + name, part="MLP")
        for name in config.family.inputs
    ]
    return [*inputs, Tensor(f"{at}.down_proj", width, inner, columns_by="inner", title=f"{kind}down_proj", part="MLP")]


def shared_gate(config: DecoderConfig, experts: ExpertsConfig) -> Tensor | None:
    """Return the gate of the expert that all tokens use, if it has one."""
    if experts.shared_gate is None:
        return None
    return Tensor(f"mlp.{experts.shared_gate}", 1, config.hidden_size, title="shared gate", part=_EXPERTS)


def router(config: DecoderConfig, experts: ExpertsConfig) -> Tensor:
    return Tensor(f"mlp.{experts.router}", experts.count, config.hidden_size, title="router", part=_EXPERTS)


def expert_stacks(config: DecoderConfig, experts: ExpertsConfig) -> list[Tensor]:
    """Return the projections into experts, then the ones out of them."""
    width = config.hidden_size
    inner = experts.size
    sizes: dict[str, tuple[int, int]] = dict.fromkeys(config.family.inputs, (inner, width))
    sizes["down_proj"] = (width, inner)
    return [
        Tensor(
            f"mlp.{experts.stacked}.{name}",
            rows,
            columns,
            rows_by=None if name == "down_proj" else "inner",
            columns_by="inner" if name == "down_proj" else None,
            title=f"expert {name}",
            part=_EXPERTS,
            count=experts.count,
            active=experts.active,
            single=f"mlp.{experts.each}.{name}",
        )
        for name, (rows, columns) in sizes.items()
    ]


def layer_input(config: DecoderConfig) -> list[Tensor]:
    """Return the gate and the projection of a layer's own input, if layers have some."""
    size = config.input_size
    width = config.hidden_size
    if not size:
        return []
    return [
        Tensor("per_layer_input_gate", size, width, part="MLP"),
        Tensor("per_layer_projection", width, size, part="MLP"),
    ]
