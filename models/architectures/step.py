"""Step 3.5: other heads in layers with a window, gates of heads, and bounds of activations in single layers.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guards: tests/parity/test_mlx_lm_families.py by logits, and tests/models/architectures/test_step.py.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, ExpertsConfig, Family, RopeConfig
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import check_shared_heads, full_rope, sliding_layers
from headrace.runtime.errors import CheckpointError

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def _keys(config: Config) -> None:
    """Leave out the kinds of layers that draft tokens, and add the usual key of K/V heads."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and type(config.get("num_hidden_layers")) is int:
        config["layer_types"] = kinds[: config["num_hidden_layers"]] or None
    if config.get("num_attention_groups") is not None:
        config["num_key_value_heads"] = config["num_attention_groups"]


def _of_layers(fields: Fields, key: str, default: float) -> list[float]:
    """Return a number of each layer, as listed or the same for all. Missing ones have the default."""
    stated = fields.values.get(key)
    count = fields.count("num_hidden_layers")
    if isinstance(stated, list):
        listed = stated[:count]
    elif stated is None:
        listed = []
    else:
        listed = [stated] * count
    numbers = [default if number is None else number for number in listed]
    if any(isinstance(number, bool) or not isinstance(number, int | float) or number < 0 for number in numbers):
        raise CheckpointError(f"config.json: {key} must list numbers, not {stated!r:.60}")
    return [float(number) for number in numbers] + [default] * (count - len(numbers))


def _turns(fields: Fields, architecture: Architecture, kind: str) -> set[tuple[float, float]]:
    """Return the base and the rotated part of a head of all layers of a kind."""
    bases = fields.values.get("rope_theta")
    if isinstance(bases, list) and len(bases) < fields.count("num_hidden_layers"):
        raise CheckpointError(f"config.json: rope_theta must have an entry for each layer, not {bases!r:.60}")
    # 1e4 and 1.0 are mlx-lm's defaults, too.
    turns = zip(_of_layers(fields, "rope_theta", 1e4), _of_layers(fields, "partial_rotary_factors", 1.0), strict=True)
    slides = sliding_layers(fields, architecture, fields.count("num_hidden_layers"))
    return {turn for turn, slide in zip(turns, slides, strict=True) if slide == (kind == _SLIDING)}


def _ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of both kinds of layers. `yarn_only_types` are the kinds with scaling, of any sort."""
    scaled = fields.values.get("yarn_only_types") or [_FULL, _SLIDING]
    ropes = []
    for kind in (_FULL, _SLIDING):
        # All layers of a kind turn alike (`_runs` refuses others): there is one pair, or none without such layers,
        # which then get the defaults of `_turns`.
        theta, share = next(iter(sorted(_turns(fields, architecture, kind))), (1e4, 1.0))
        scaling = fields.values.get("rope_scaling") if kind in scaled else None
        of_kind = Fields({**fields.values, "rope_theta": theta, "rope_scaling": scaling, "rope_parameters": None})
        ropes.append(full_rope(of_kind, architecture, share=share))
    return ropes[0], ropes[1]


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer, with the bound of its activations."""
    experts = ExpertsConfig(
        *count_experts(fields, "moe_num_experts", "moe_top_k"),
        size=fields.count("moe_intermediate_size"),
        normalized=bool(fields.values.get("norm_expert_weight", True)),
        router="gate.gate",
        sigmoid=True,  # as mlx-lm's class takes it for all of them
        correction="gate.router_bias",
        scale=fields.positive("moe_router_scaling_factor"),
        shared=fields.count("share_expert_dim"),
        shared_at="share_expert",
    )
    limits = _of_layers(fields, "swiglu_limits", 0.0)
    sparse = _sparse(fields, layers)
    return [replace(experts, limit=limits[i]) if i in sparse else None for i in range(layers)]


def _sparse(fields: Fields, layers: int) -> set[int]:
    """Return the layers with experts, as `moe_layers_enum` lists them ("3,4,5"); without it, all but the first."""
    stated = fields.values.get("moe_layers_enum")
    if not stated:
        return set(range(1, layers))
    try:
        return {int(number) for number in str(stated).split(",")}
    except ValueError:
        raise CheckpointError(f"config.json: moe_layers_enum must list layers, not {stated!r:.60}") from None


def _runs(fields: Fields) -> bool:
    """Return False for what mlx-lm's class has to run: layers of a kind that turn differently, or one expert a token.

    `_ropes` would give all layers of a kind one rotation. A single expert has the weight 1, since weights are divided
    by their sum; `ops.mixtures` would take its score.
    """
    turns = [_turns(fields, _STEP, kind) for kind in (_FULL, _SLIDING)]
    return all(len(each) < 2 for each in turns) and fields.values.get("moe_top_k") != 1


def _complete(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the heads of layers with a window, and the bounds of activations, and leave out gates if the config does."""
    other = Fields(fields.section("attention_other_setting"))
    heads = other.count("num_attention_heads", default=decoder.heads)
    kv_heads = other.count("num_attention_groups", default=decoder.kv_heads)
    check_shared_heads(heads, kv_heads)
    family = decoder.family
    if not fields.values.get("use_head_wise_attn_gate", True):
        family = replace(family, gates=None)
    limits = _of_layers(fields, "swiglu_limits_shared", 0.0)
    layers = []
    for layer, limit in zip(decoder.layers, limits, strict=True):
        slides = layer.window is not None
        # 0 heads are as many as `decoder` has.
        layers.append(
            replace(
                layer,
                heads=heads if slides and heads != decoder.heads else 0,
                kv_heads=kv_heads if slides and kv_heads != decoder.kv_heads else 0,
                limit=limit,
            )
        )
    # The weights of norms are stored minus one.
    return replace(decoder, family=family, layers=tuple(layers), norm_weight_offset=1.0)


_STEP = Architecture(
    "step3p5",
    Family(qk_norm="head", gates="head_sigmoids"),
    defaults={
        "sliding_window": 512, "rms_norm_eps": 1e-5, "moe_num_experts": 288, "moe_top_k": 8,
        "moe_intermediate_size": 1280, "share_expert_dim": 1280, "max_position_embeddings": 262144,
        "moe_router_scaling_factor": 3.0,
    },
    add_keys=_keys,
    states_head_dim=True,
    tensor_names=(
        (".self_attn.g_proj.", ".self_attn.gate_proj."),
        (".moe.gate.", ".mlp.gate.gate."),
        (".moe.router_bias", ".mlp.gate.router_bias"),
        (".moe.", ".mlp.switch_mlp."),
        (".share_expert.", ".mlp.share_expert."),
        (".mlp.mlp.", ".mlp."),  # in conversions: the row before has made ".mlp.mlp.share_expert." of their names
    ),
    converted=".mlp.gate.gate.",
    rotated=1.0,
    ropes=_ropes,
    sliding="even",
    experts=_experts,
    runs=_runs,
    biases={},
    complete=_complete,
)  # fmt: skip

ROWS = (_STEP,)
