"""Table of the matrices and vectors of a layer, block by block. Loading, costs and division over ranks loop over it.

Names are those of `models.checkpoint.text_part`, below the layer. Each block is a function from the configuration to
its rows, in the order of computation.

A new matrix is a row here, and is read in `layers.py` or a file that it calls. Tests compare the costs of headers
with those of loaded arrays (`tests/models/cost/test_costs.py`, `tests/models/cost/test_step_shape.py`), and divided
networks with whole ones (`tests/models/network/test_ranks.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.config import (
    AltUpConfig,
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MixerConfig,
    TimeMixConfig,
)

Unit = Literal["inner", "heads", "head_stack", "kv_heads", "mixer_heads", "mixer_keys", "vocabulary"]
"""Units that ranks divide: numbers inside a feed-forward, heads of queries (also if they are stored as a stack, as its
first axis), heads of K/V, heads of a mixer (channels of a short convolution), its heads of keys, and tokens."""

Segments = tuple[tuple[Unit, int], ...]
"""Rows of a tensor in order: what ranks divide them by, and their number."""


_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
_EXPERTS = "experts used"  # part of the network, in accounts of bytes

HEAD_INPUT = "model.embed_tokens"
"""Module of a prediction head's joined input, in the model of one layer that it is read as."""


class Tensor(Struct, frozen=True):
    """A matrix of a layer, or a stack of the experts' matrices."""

    name: str  # module, below the layer if it is in one
    rows: int  # outputs
    columns: int  # inputs
    rows_by: Unit | None = None  # ranks have some of the rows
    segments: Segments = ()  # the same, of rows with several units
    columns_by: Unit | None = None  # ranks have some of the columns
    whole: str = ""  # module that some checkpoints have instead: the rows of all tensors with this `whole`
    before_append: bool = False  # needed for the entry that a token appends to K/V or recurrent state
    title: str = ""  # in tables of costs, if not the end of its name
    part: str = "attention"  # of the network, in accounts of bytes
    count: int = 1  # experts
    active: int = 1  # of them, for each token
    single: str = ""  # module of a single stored expert, with {} for its number
    looked_up: bool = False  # a table of which a step reads single rows
    output: bool = False  # makes the logits
    scores: bool = False  # selects or scales whole experts or streams: small errors select others
    has_bias: bool = False  # as the config states it; checkpoints may have one anyway

    @property
    def is_divided(self) -> bool:
        """True if a rank has a part of it in tensor parallelism, False if every rank has all of it."""
        return bool(self.row_segments) or self.columns_by is not None

    @property
    def row_segments(self) -> Segments:
        """The rows by their units; empty if ranks have all of them."""
        if self.rows_by is not None:
            return ((self.rows_by, self.rows),)
        return self.segments

    @property
    def product(self) -> str:
        """Name of the product that it is a part of: of all tensors with the same `whole`, which have one input.

        The stacks into experts have one input, too: that of a token's experts.
        """
        if self.count > 1 and self.rows_by == "inner":
            return f"{self.name.rpartition('.')[0]}.gate_up"
        return self.whole.removesuffix("_proj") or self.name

    @property
    def shown_name(self) -> str:
        """Name in tables of costs."""
        return self.title or self.name.rpartition(".")[2]


def ends(config: DecoderConfig) -> list[Tensor]:
    """Return the matrices outside of layers."""
    width = config.hidden_size
    vocabulary = config.vocab_size
    tied = config.tied_embeddings
    tensors = [
        Tensor(
            "model.embed_tokens",
            vocabulary,
            width,
            rows_by="vocabulary",
            part="head",
            looked_up=not tied,
            output=tied,
        )
    ]
    if not tied:
        tensors.append(Tensor("lm_head", vocabulary, width, rows_by="vocabulary", part="head", output=True))
    if config.positions:
        tensors.append(Tensor("model.embed_positions", config.positions, width, looked_up=True))
    if config.input_size:
        inputs = len(config.layers) * config.input_size
        tensors.append(Tensor("model.embed_tokens_per_layer", config.input_vocab, inputs, looked_up=True))
        tensors.append(Tensor("model.per_layer_model_projection", inputs, width, part="MLP"))
    if config.altup is not None:
        tensors += chain.from_iterable(stream_projections(config, config.altup))
    return [replace(tensor, has_bias=tensor.name in config.biased) for tensor in tensors]


def stream_projections(config: DecoderConfig, altup: AltUpConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Return the projections of the embedding to the streams after the first, and those of these streams at the end."""
    width = config.hidden_size
    into, out = (
        [Tensor(f"model.{name}.{stream}", width, width, title=title, part="MLP") for stream in range(altup.streams - 1)]
        for name, title in (("altup_projections", "into streams"), ("altup_unembed_projections", "out of streams"))
    )
    return into, out


def named_tensors(config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield all matrices of the decoder, each with the prefix of its layer's name, empty outside of layers.

    Two rows may be the same numbers in different forms: those of `latent`, and `latent_heads`.
    """
    for tensor in ends(config):
        yield "", tensor
    for index, layer in enumerate(config.stored):
        prefix = f"model.layers.{index}."
        for tensor in layer_tensors(config, layer):
            yield prefix, tensor
        if config.latent is not None:
            yield prefix, latent_heads(config, config.latent)


def scoring_modules(config: DecoderConfig) -> set[str]:
    """Return the modules whose outputs select or scale whole experts or streams: they need at least 8 bits."""
    return {f"{prefix}{tensor.name}" for prefix, tensor in named_tensors(config) if tensor.scores}


def head_projection(config: DecoderConfig) -> Tensor:
    """Return the projection of a prediction head's joined input, which its one layer has in place of a table."""
    width = config.hidden_size
    return Tensor(f"{HEAD_INPUT}.projection", width, 2 * width, part="head", output=True)


def layer_tensors(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return all matrices of a layer."""
    blocks: list[Sequence[Tensor]] = []
    if layer.attends:
        if config.latent is None:
            blocks.append(attention(config, layer))
        else:
            blocks.append(latent(config, config.latent))
        blocks.append(attention_gate(config, layer))
    if layer.mixer is not None:
        blocks.append(mixer_matrices(config, layer.mixer))
    blocks.append(indexer(config, layer))
    blocks.append(feed_forward(config, layer))
    if layer.experts is not None:
        blocks += [[router(config, layer.experts)], expert_latents(config, layer.experts)]
        blocks.append(expert_stacks(config, layer.experts))
        gate = shared_gate(config, layer.experts)
        if gate is not None:
            blocks.append([gate])
    blocks.append(layer_input(config))
    if config.altup is not None:
        blocks.append(altup_layer(config, config.altup))
    tensors = chain.from_iterable(blocks)
    return [replace(tensor, has_bias=tensor.name in config.biased) for tensor in tensors]


def attention(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return the projections into attention, then the one out of it."""
    kv_heads, head_dim = config.heads_of(layer)
    width = config.hidden_size
    heads = config.query_heads(layer)
    queries = heads * head_dim
    entries = kv_heads * head_dim
    value_dim = config.value_size(layer)
    output = Tensor("self_attn.o_proj", width, heads * value_dim, columns_by="heads")
    if config.family.by_kv_head:
        total = queries + 2 * entries
        joint = Tensor("self_attn.qkv_proj", total, width, segments=(("kv_heads", total),), before_append=True)
        return [joint, output]
    rows = {"q": queries, "k": entries, "v": kv_heads * value_dim}
    if config.family.gates == "joined":  # D rows and then D gates of each head
        rows["q"] *= 2
    units: dict[str, Unit] = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    whole = "self_attn.qkv_proj"
    inputs = [
        Tensor(f"self_attn.{part}_proj", rows[part], width, rows_by=units[part], whole=whole, before_append=True)
        for part in layer.projects
    ]
    return [*inputs, output]


def attention_gate(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return the gates of attention's heads, if they are stored apart."""
    if config.family.gates in (None, "joined"):
        return []
    size = 1
    if config.family.gates == "apart":
        _, size = config.heads_of(layer)
        if config.latent is not None:
            size = config.latent.value
    rows = config.query_heads(layer) * size
    return [Tensor("self_attn.gate_proj", rows, config.hidden_size, rows_by="heads")]


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


def indexer(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return the projections to an indexer's queries and keys, if the layer has one; over latents, to weights, too."""
    sizes = layer.own_indexer
    if sizes is None:
        return []
    width = config.hidden_size
    queries = sizes.heads * sizes.head_dim
    if config.latent is None:
        return [
            Tensor("self_attn.index_q_proj", queries, width, rows_by="kv_heads"),
            Tensor("self_attn.index_k_proj", sizes.head_dim, width, before_append=True),
        ]
    at = "self_attn.indexer"
    return [
        Tensor(f"{at}.wq_b", queries, config.latent.queries),
        Tensor(f"{at}.weights_proj", sizes.heads, width),
        Tensor(f"{at}.wk", sizes.head_dim, width, before_append=True),
    ]


def mixer_matrices(config: DecoderConfig, mixer: MixerConfig) -> list[Tensor]:
    """Return all matrices of a mixer."""
    if mixer.time_mix is not None:
        return time_mix(config, mixer.time_mix)
    products = scan_products(mixer) if mixer.scan is not None else mixer_gates(mixer)
    return [*mixer_inputs(config, mixer), *products, mixer_output(config, mixer)]


def mixer_inputs(config: DecoderConfig, mixer: MixerConfig) -> list[Tensor]:
    """Return the stored projections into a mixer."""
    sizes = mixer.sizes
    keys = sizes.key_heads * sizes.key_dim
    inner: Segments = (("mixer_heads", sizes.inner),)
    heads: Segments = (("mixer_heads", sizes.heads),)
    key: Segments = (("mixer_keys", keys),)

    # Rows of each stored module, by what ranks divide them by
    rows: dict[str, Segments]
    if mixer.apart:
        rows = {"q_proj": key, "k_proj": key, "v_proj": inner}
        if mixer.rank:  # no segments: `mixer.rank` rows, which every rank has
            if mixer.full_gate:
                rows["g_proj"] = inner
            else:
                rows["g_a_proj"] = ()
            rows |= {"f_a_proj": (), "b_proj": heads}
        else:
            rows |= {"g_proj": inner, "b_proj": heads, "a_proj": (("mixer_heads", sizes.decays),)}
    elif mixer.by_key_head:
        rows = {
            "in_proj_qkvz": (("mixer_keys", sizes.channels + sizes.inner),),
            "in_proj_ba": (("mixer_keys", 2 * sizes.heads),),
        }
    elif sizes.kind == "delta":
        rows = {"in_proj_qkv": _channels(mixer), "in_proj_z": inner, "in_proj_b": heads, "in_proj_a": heads}
    elif mixer.scan is not None:
        rows = {"in_proj": 2 * inner}
    elif sizes.kind == "conv":
        rows = {"in_proj": (*inner, *inner, *inner)}
    else:
        rows = {"in_proj": (*inner, *_channels(mixer), *heads)}
    return [
        Tensor(
            f"mixer.{name}",
            sum(count for _, count in segments) or mixer.rank,
            config.hidden_size,
            segments=segments,
            whole="mixer.qkv_proj" if sizes.kind == "kda" and name in _QUERIES_KEYS_VALUES else "mixer.in_proj",
            before_append=True,
        )
        for name, segments in rows.items()
    ]


def _channels(mixer: MixerConfig) -> Segments:
    """Return the channels of a mixer's convolution, as they are stored."""
    sizes = mixer.sizes
    keys = sizes.key_heads * sizes.key_dim
    if sizes.kind == "conv":
        return (("mixer_heads", sizes.inner),)
    if sizes.kind == "ssm":
        return ("mixer_heads", sizes.inner), ("mixer_keys", keys), ("mixer_keys", keys)  # x, B, C
    return ("mixer_keys", keys), ("mixer_keys", keys), ("mixer_heads", sizes.inner)


def mixer_gates(mixer: MixerConfig) -> list[Tensor]:
    """Return the second products to gates and decays, of a mixer that has two; gates may have one."""
    if not mixer.rank:
        return []
    rows = {} if mixer.full_gate else {"g_b_proj": mixer.sizes.inner}
    rows["f_b_proj"] = mixer.sizes.decays
    return [
        Tensor(f"mixer.{name}", count, mixer.rank, rows_by="mixer_heads", before_append=True)
        for name, count in rows.items()
    ]


def scan_products(mixer: MixerConfig) -> list[Tensor]:
    """Return the products between a convolution and the scan after it: to steps, B and C, and from rank to steps."""
    assert mixer.scan is not None
    inner = mixer.sizes.inner
    [scan] = mixer.later
    rows = mixer.scan.rank + 2 * scan.key_dim
    return [
        Tensor("mixer.x_proj", rows, inner, before_append=True),
        Tensor("mixer.dt_proj", inner, mixer.scan.rank, before_append=True),
    ]


def time_mix(config: DecoderConfig, sizes: TimeMixConfig) -> list[Tensor]:
    """Return the matrices of an RWKV-7 layer before its feed-forward, whose input is a state, too."""
    width = config.hidden_size
    names = ["r_proj", "k_proj", "v_proj", "o_proj"]
    tensors = [Tensor(f"attn.{name}", width, width, before_append=True) for name in names]
    for letter, rank in sizes.ranks.items():
        first, second = low_rank_names(letter)
        tensors.append(Tensor(first, rank, width, before_append=True, title=f"{letter} to rank"))
        tensors.append(Tensor(second, width, rank, before_append=True, title=f"{letter} from rank"))
    return tensors


def low_rank_names(letter: str) -> tuple[str, str]:
    """Return the modules of a product of low rank, below an RWKV-7 layer."""
    at = f"attn.{letter}_lora.lora"
    return f"{at}.0", f"{at}.2"


def mixer_output(config: DecoderConfig, mixer: MixerConfig) -> Tensor:
    """Return the projection out of a mixer."""
    return Tensor("mixer.out_proj", config.hidden_size, mixer.sizes.inner, columns_by="mixer_heads")


def feed_forward(config: DecoderConfig, layer: LayerConfig) -> list[Tensor]:
    """Return the feed-forward that all tokens use: projections into it, and the one out of it; empty without."""
    experts = layer.experts
    if experts is None or experts.branch:
        if not layer.feeds:
            return []
        return _feed_forward(config, "mlp", layer.inner or config.intermediate_size)
    if not experts.shared:
        return []
    return _feed_forward(config, f"mlp.{experts.shared_at}".rstrip("."), experts.shared, "shared ")


def _feed_forward(config: DecoderConfig, at: str, inner: int, kind: str = "") -> list[Tensor]:
    """Return a feed-forward's projections below the module `at`. kind: before their names in tables of costs."""
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
    rows = 2 if experts.weighs_both else 1
    name = f"mlp.{experts.shared_gate}"
    return Tensor(name, rows, config.hidden_size, title="shared gate", part=_EXPERTS, scores=True)


def router(config: DecoderConfig, experts: ExpertsConfig) -> Tensor:
    """Return the projection to a score for each expert."""
    name = f"mlp.{experts.router}"
    return Tensor(name, experts.count, config.hidden_size, title="router", part=_EXPERTS, scores=True)


def expert_stacks(config: DecoderConfig, experts: ExpertsConfig) -> list[Tensor]:
    """Return the projections into experts, then the ones out of them."""
    width = experts.latent or config.hidden_size
    inner = experts.size

    def stack(name: str, rows: int, columns: int, *, rows_by: Unit | None, columns_by: Unit | None) -> Tensor:
        return Tensor(
            f"mlp.{experts.stacked}.{name}",
            rows,
            columns,
            rows_by=rows_by,
            columns_by=columns_by,
            title=f"expert {name}",
            part=_EXPERTS,
            count=experts.count,
            active=experts.active,
            single=f"mlp.{experts.each}.{name}",
        )

    inputs = [stack(name, inner, width, rows_by="inner", columns_by=None) for name in config.family.inputs]
    return [*inputs, stack("down_proj", width, inner, rows_by=None, columns_by="inner")]


def expert_latents(config: DecoderConfig, experts: ExpertsConfig) -> list[Tensor]:
    """Return the projections to the experts' input and from their sum, if experts have a width of their own."""
    if not experts.latent:
        return []
    width = config.hidden_size
    at = "mlp.routed_expert"
    return [
        Tensor(f"{at}_down_proj", experts.latent, width, title="into experts", part=_EXPERTS),
        Tensor(f"{at}_up_proj", width, experts.latent, title="out of experts", part=_EXPERTS),
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


def altup_layer(config: DecoderConfig, altup: AltUpConfig) -> list[Tensor]:
    """Return the router of a layer's alternating updates, and the low-rank product next to attention."""
    width = config.hidden_size
    return [
        Tensor("altup.modality_router", altup.streams, width, before_append=True, scores=True),
        Tensor("laurel.linear_left", altup.rank, width),
        Tensor("laurel.linear_right", width, altup.rank),
    ]


class Vector(Struct, frozen=True):
    """A tensor of a layer that is no matrix. Of a convolution, the numbers of a channel count as one."""

    name: str  # below the layer
    size: int
    segments: Segments = ()  # empty if ranks have all of it
    width: int = 1  # numbers of each of the `size`


def layer_vectors(config: DecoderConfig, layer: LayerConfig) -> list[Vector]:
    """Return the norms of a layer, and the small tensors of its attention, mixer and experts."""
    width = config.hidden_size
    names = config.family.norms_of(layer)
    norms = [names.attention, names.after_attention, names.mlp, names.after_mlp]
    if not config.family.norm_weights:
        norms = []
    parts = ("weight", "bias") if config.family.norm_bias else ("weight",)
    vectors = [Vector(f"{name}.{part}", width) for name in dict.fromkeys(norms) if name is not None for part in parts]

    if layer.attends:
        vectors += _attention_vectors(config, layer)
    if layer.mixer is not None:
        vectors += _mixer_vectors(config, layer.mixer)

    # Of experts
    experts = layer.experts
    if experts is not None and experts.correction is not None:
        vectors.append(Vector(f"mlp.{experts.correction}", experts.count))
    if experts is not None and experts.latent_norm:
        vectors.append(Vector(LATENT_NORM, experts.latent))
    if experts is not None and experts.branch:
        vectors += [Vector("mlp.router_norm.weight", width), Vector("mlp.expert_scale", experts.count)]
        vectors += [Vector(f"{name}.weight", width) for name in BRANCH_NORMS]

    # Of single families
    if config.family.inner_norms:
        vectors += inner_norms(config, layer)
    if config.input_size:
        vectors.append(Vector("post_per_layer_input_norm.weight", width))
    if config.family.scaled:
        vectors.append(Vector("layer_scalar", 1))
    if config.altup is not None:
        vectors += _altup_vectors(config, config.altup)
    if config.block_layers:
        vectors += [Vector(f"{name}_{part}.weight", width) for name in RESIDUAL_MIXES for part in ("norm", "proj")]
    return vectors


def inner_norms(config: DecoderConfig, layer: LayerConfig) -> list[Vector]:
    """Return the norms before the projections out of attention and out of the dense feed-forward."""
    heads = config.query_heads(layer) * config.value_size(layer)
    inner = layer.inner or config.intermediate_size
    return [Vector("self_attn.attn_sub_norm.weight", heads), Vector("mlp.ffn_sub_norm.weight", inner)]


def head_norms(config: DecoderConfig) -> list[Vector]:
    """Return the norms of a prediction head outside its layer: its last, and those of its two inputs."""
    names = ("model.norm", f"{HEAD_INPUT}.embedding_norm", f"{HEAD_INPUT}.hidden_norm")
    return [Vector(f"{name}.weight", config.hidden_size) for name in names]


LATENT_NORM = "mlp.routed_expert_norm.weight"
"""Norm of the sum of experts with a width of their own."""

RESIDUAL_MIXES = ("self_attention_res", "mlp_res")
"""Begin of the names of a layer's mixtures of residual sums: before attention or a mixer, before the feed-forward."""

BRANCH_NORMS = (
    "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip
"""Norms after a dense feed-forward, before the experts next to it, and after those."""


def _attention_vectors(config: DecoderConfig, layer: LayerConfig) -> list[Vector]:
    """Return the norms of latents or of heads, sinks, and the norms of an indexer."""
    at = "self_attn"
    if config.latent is not None:
        latents = {"q_a_layernorm": config.latent.queries, "kv_a_layernorm": config.latent.size}
        vectors = [Vector(f"{at}.{name}.weight", size) for name, size in latents.items() if size]
        sizes = layer.own_indexer
        if sizes is not None:
            vectors += [Vector(f"{at}.indexer.k_norm.{part}", sizes.head_dim) for part in ("weight", "bias")]
        return vectors
    kv_heads, dim = config.heads_of(layer)
    vectors = []
    units: dict[str, tuple[Unit, int]] = {"q": ("heads", config.query_heads(layer)), "k": ("kv_heads", kv_heads)}
    for part, (unit, heads) in units.items():
        if part not in layer.projects or config.family.qk_norm in (None, "unit", "turned_unit"):
            continue
        name = f"{at}.{part}_norm.weight"
        if config.family.qk_norm == "heads":  # over all heads together
            vectors.append(Vector(name, heads * dim, ((unit, heads * dim),)))
        elif config.family.qk_norm == "layer":
            vectors.append(Vector(name, heads, ((unit, heads),), dim))
        else:
            vectors.append(Vector(name, dim))
    if layer.sinks:
        heads = config.query_heads(layer)
        vectors.append(Vector(f"{at}.sinks", heads, (("heads", heads),)))
    if config.loop_gates:
        heads = config.query_heads(layer)
        vectors.append(Vector(f"{at}.loop_gate.weight", heads, (("heads", heads),), dim))
        vectors.append(Vector(f"{at}.loop_gate.bias", heads, (("heads", heads),)))
    if layer.own_indexer is not None:
        vectors += [Vector(f"{at}.index_{part}_norm.weight", layer.own_indexer.head_dim) for part in units]
    return vectors


def _altup_vectors(config: DecoderConfig, altup: AltUpConfig) -> list[Vector]:
    names = ("altup.router_norm.weight", "altup.correct_output_scale", "laurel.post_laurel_norm.weight")
    return [
        *(Vector(name, config.hidden_size) for name in names),
        Vector("altup.prediction_coefs.weight", altup.streams**2, width=altup.streams),
        Vector("altup.correction_coefs.weight", altup.streams, width=altup.streams),
    ]


def joined_convolution(mixer: MixerConfig | None) -> list[Vector]:
    """Return the convolution that some checkpoints have instead of those of queries, keys and values, if any."""
    if mixer is None or not mixer.apart:
        return []
    return [Vector("mixer.qkv_conv1d.weight", mixer.sizes.channels, _channels(mixer), mixer.sizes.width)]


def _mixer_vectors(config: DecoderConfig, mixer: MixerConfig) -> list[Vector]:
    """Return the convolution of a mixer, then the numbers of its recurrence and its norm."""
    sizes = mixer.sizes
    if mixer.time_mix is not None:
        return _time_mix_vectors(config)

    # The convolution, of all channels or of queries, keys and values by themselves
    vectors = []
    segments = _channels(mixer)
    convolutions: dict[str, Segments] = {"conv1d": segments}
    if mixer.apart:
        names = ("q_conv1d", "k_conv1d", "v_conv1d")
        convolutions = {name: (segment,) for name, segment in zip(names, segments, strict=True)}
    for name, channels in convolutions.items():
        count = sum(size for _, size in channels)
        vectors.append(Vector(f"mixer.{name}.weight", count, channels, sizes.width))
        if sizes.kind == "ssm" or f"mixer.{name}" in config.biased:
            vectors.append(Vector(f"mixer.{name}.bias", count, channels))

    # The recurrence: a scan of channels, none, or one of heads
    if mixer.scan is not None:
        [scan] = mixer.later
        vectors += [Vector("mixer.A_log", scan.heads, width=scan.key_dim), Vector("mixer.D", scan.heads)]
    if sizes.kind == "conv":
        return vectors
    heads: Segments = (("mixer_heads", sizes.heads),)
    vectors.append(Vector("mixer.A_log", sizes.heads, heads))
    vectors.append(Vector("mixer.dt_bias", sizes.decays, (("mixer_heads", sizes.decays),)))
    if sizes.kind != "ssm":
        return [*vectors, Vector("mixer.norm.weight", sizes.value_dim)]
    vectors.append(Vector("mixer.D", sizes.heads, heads))
    if mixer.norm_parts:
        vectors.append(Vector("mixer.norm.weight", sizes.inner, (("mixer_heads", sizes.inner),)))
    return vectors


TIME_MIXES = ("r", "w", "k", "v", "a", "g")
"""Letters of the inputs of an RWKV-7 layer, in the order of its shift's results."""

CHANNEL_MIX = "mlp.x_k"
"""Share of the row before in the input of an RWKV-7 layer's feed-forward."""


def _time_mix_vectors(config: DecoderConfig) -> list[Vector]:
    names = [f"x_{letter}" for letter in TIME_MIXES]
    names += ["k_k", "k_a", "r_k", "g_norm.weight", "g_norm.bias"]
    return [Vector(name, config.hidden_size) for name in (*(f"attn.{name}" for name in names), CHANNEL_MIX)]
