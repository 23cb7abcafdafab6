"""MiMo: dense with a head that drafts; V2 has keys of 192 and values of 128, windows with sinks, and mixtures.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import QKV, Architecture, Config, HeadNames
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, Family, LayerConfig, RopeConfig
from headrace.models.architectures.experts import corrected_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import check_shared_heads

_HEAD = HeadNames(
    prefix="model.mtp_layers.0.",
    layer="",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    hidden_first=True,
)
# Values that transformers' class has, and mlx-lm's reads from the config
_V2 = {
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_shared_experts": None,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
}  # fmt: skip


def _v2_keys(config: Config) -> None:
    """State the layers in both ways: as transformers' lists of kinds, and as mlx-lm's class reads them."""
    attention = config.get("layer_types")
    mlp = config.get("mlp_layer_types")
    rope = config.get("rope_parameters")
    pattern = config.get("hybrid_layer_pattern")
    # From mlx-lm's keys, as published configs have them, to transformers'
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if kind == 1 else "full_attention" for kind in pattern]
        config.setdefault("layer_types", kinds)
        config.setdefault("sliding_window", config.get("sliding_window_size"))
    # From transformers' keys, as it saves them, to mlx-lm's
    if not (isinstance(attention, list) and isinstance(mlp, list) and isinstance(rope, dict)):
        return
    local = rope.get("sliding_attention") or {}
    config.setdefault("hybrid_layer_pattern", [int(kind == "sliding_attention") for kind in attention])
    config.setdefault("moe_layer_freq", [int(kind == "sparse") for kind in mlp])
    config.setdefault("layernorm_epsilon", config.get("rms_norm_eps"))
    config.setdefault("sliding_window_size", config.get("sliding_window"))
    config.setdefault("swa_rope_theta", local.get("rope_theta", 10000.0))
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        config.setdefault(f"swa_{key}", config.get(key))
    if type(config.get("num_key_value_heads")) is int:  # transformers' class doubles them in layers with a window
        config.setdefault("swa_num_key_value_heads", 2 * config["num_key_value_heads"])


def _turned(fields: Fields) -> int:
    """Return the number of dimensions of a head that turn."""
    return int(fields.positive("partial_rotary_factor", default=1.0) * fields.count("head_dim"))


def _v2_ropes(fields: Fields, _architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of layers with a window)."""
    share = _turned(fields) / fields.count("head_dim")
    full, local = (RopeConfig(fields.positive(key), share=share) for key in ("rope_theta", "swa_rope_theta"))
    return full, local


def _v2_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of the layers that `moe_layer_freq` marks by 1."""
    experts = corrected_experts(fields)
    shared = fields.count_or_zero("n_shared_experts", default=0)
    experts = replace(experts, shared=shared * experts.size)
    kinds = fields.listed("moe_layer_freq", layers) or []
    return [experts if kind == 1 else None for kind in kinds]


def _v2_runs(fields: Fields) -> bool:
    """Return False for layers with heads of several sizes, values larger than keys, and other rotations."""
    sizes = {kind: fields.count(f"{kind}head_dim") for kind in ("", "swa_", "v_", "swa_v_")}
    same = sizes[""] == sizes["swa_"] and sizes["v_"] == sizes["swa_v_"]
    return same and sizes["v_"] <= sizes[""] and _turned(fields) > 0 and not fields.section("rope_scaling")


def _v2(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the sizes of values, and the heads and sinks of layers with a window."""
    value = fields.count("v_head_dim")
    heads = fields.count("swa_num_attention_heads")
    kv_heads = fields.count("swa_num_key_value_heads")
    check_shared_heads(heads, kv_heads)  # of layers with a window

    def completed(layer: LayerConfig) -> LayerConfig:
        layer = replace(layer, value_dim=value)
        if layer.window is None:
            return replace(layer, sinks=bool(fields.values.get("add_full_attention_sink_bias")))
        sinks = bool(fields.values.get("add_swa_attention_sink_bias"))
        return replace(layer, heads=heads, kv_heads=kv_heads, sinks=sinks)

    return replace(
        decoder,
        value_scale=fields.positive("attention_value_scale", default=1.0),
        layers=tuple(completed(layer) for layer in decoder.layers),
    )


ROWS = (
    Architecture("mimo", Family(), head=_HEAD, biases={}, biased=QKV),
    Architecture(
        "mimo_v2_flash",
        Family(),
        constants=_V2,
        add_keys=_v2_keys,
        tensor_names=((".attention_sink_bias", ".sinks"),),
        is_unread=lambda name, _config: name.startswith("model.mtp."),
        eps="layernorm_epsilon",
        only={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        rotated=1.0,
        ropes=_v2_ropes,
        experts=_v2_experts,
        runs=_v2_runs,
        complete=_v2,
        biases={},
        plain=(".mlp.gate",),
    ),
)
