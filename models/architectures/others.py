"""Families with one or two members, and facts of those that only mlx-lm's classes run.

A family has a section with the functions and names of its row, by its name in a comment. The rows follow at the end.
`architecture.Architecture` explains the fields of a row, the order in which its functions are called, and the tests
that a new one needs. Defaults of keys that a config lacks are those of mlx-lm's class of the family.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from headrace.models.architectures.architecture import ATTENTION, FEED_FORWARD, GPT_NAMES, QKV, Architecture, Config
from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertLayers,
    ExpertsConfig,
    Family,
    NormNames,
    RopeConfig,
)
from headrace.models.architectures.experts import (
    corrected_experts,
    count_experts,
    equal_experts,
    experts_by_step,
    several_experts,
)
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import (
    check_shared_heads,
    full_rope,
    ropes_by_kind,
    state_usual_names,
    with_sinks,
)
from headrace.models.architectures.olmo import AFTER
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Multimodal models whose text part is an ordinary decoder that gets images as embeddings
_CONTAINERS = (
    "mistral3", "pixtral", "llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava", "video_llava",
    "video_llama_3", "internvl", "idefics2", "idefics3", "smolvlm", "got_ocr2", "lighton_ocr", "granite_docling",
    "exaone4_5", "aya_vision", "cohere2_vision", "glm4v", "glm4v_moe",
)  # fmt: skip


# GPT-OSS
def _gpt_oss(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add sinks to every layer. Raises UnsupportedModelError for another bound than 7, that of "clamped"."""
    if fields.positive("swiglu_limit", default=7.0) != 7.0:
        stated = fields.values["swiglu_limit"]
        raise UnsupportedModelError(f"config.json: a gpt_oss with the swiglu_limit {stated!r}")
    return with_sinks(decoder)


# Phi-3
def _phi3_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation. Older configs call LongRoPE "su" or "yarn"."""
    rope = full_rope(fields, architecture, older_names=("su", "yarn"))
    return rope, rope


# EXAONE 3 to 4
def _exaone4_keys(config: Config) -> None:
    """State the period of windows as letters, such as "LLLG", which mlx-lm's class reads. Raises CheckpointError."""
    kinds = config.get("layer_types")
    if not isinstance(config.get("sliding_window_pattern"), int) or not isinstance(kinds, list):
        return
    pattern = config["sliding_window_pattern"]
    full = "full_attention"
    if config.get("sliding_window") is None or "sliding_attention" not in kinds:
        config["sliding_window"] = config["sliding_window_pattern"] = None
    elif kinds != [full if (i + 1) % pattern == 0 else "sliding_attention" for i in range(len(kinds))]:
        raise CheckpointError("config.json: layer_types must be periodic for this family")
    else:
        config["sliding_window_pattern"] = "L" * (pattern - 1) + "G"


_EXAONE_NAMES = (
    *GPT_NAMES,
    (".attn.attention.", ".self_attn."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)


def _exaone_keys(config: Config) -> None:
    """State the number of layers under its usual key."""
    if config.get("num_layers") is not None:  # the key that its class reads
        config["num_hidden_layers"] = config["num_layers"]


def _exaone_moe_keys(config: Config) -> None:
    """State the sparse layers under the key that mlx-lm's class reads."""
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        config.setdefault("is_moe_layer", [kind == "sparse" for kind in kinds])


def _exaone_moe_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of sparse layers. Missing keys have the defaults of mlx-lm's class."""
    stated = {"routed_scaling_factor": 2.5, "norm_topk_prob": True, **fields.values}
    experts = corrected_experts(Fields(stated), "num_experts")
    shared = fields.count_or_zero("num_shared_experts", default=0)
    experts = replace(experts, shared=shared * experts.size)
    return [experts if is_sparse else None for is_sparse in fields.required_list("is_moe_layer", layers)]


def _has_windows(fields: Fields) -> bool:
    """Return False without sliding layers: then all layers rotate."""
    return "sliding_attention" in (fields.values.get("layer_types") or [])


# Trinity
_AFMOE_NORMS = NormNames("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


def _afmoe_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer after the first dense ones."""
    values = fields.values
    stated = {
        **values,
        "norm_topk_prob": values.get("route_norm", True),
        "routed_scaling_factor": values.get("route_scale", 2.826),
    }
    experts = corrected_experts(Fields(stated), "num_experts")
    shared = fields.count_or_zero("num_shared_experts", default=1)
    experts = replace(
        experts,
        router="router.gate",
        stacked="experts",
        sigmoid=values.get("score_func", "sigmoid") == "sigmoid",
        correction="expert_bias",
        shared=shared * experts.size,
    )
    dense = fields.count_or_zero("num_dense_layers", default=2)
    return [None if i < dense else experts for i in range(layers)]


def _afmoe(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the scale of embeddings, unless the config turns it off."""
    scaled = fields.values.get("mup_enabled", True)
    return replace(decoder, embedding_scale=decoder.hidden_size**0.5 if scaled else 1.0)


# Laguna
def _laguna_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of sparse layers; without a list, of all but the first."""
    experts = ExpertsConfig(
        *count_experts(fields, "num_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=True,
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        scale=fields.positive("moe_routed_scaling_factor", default=1.0),
        shared=fields.count("shared_expert_intermediate_size"),
        shared_at="shared_expert",
    )
    kinds = fields.listed("mlp_layer_types", layers)
    if kinds is None:
        kinds = ["dense", *["sparse"] * (layers - 1)]
    return [experts if kind == "sparse" else None for kind in kinds]


def _laguna_runs(fields: Fields) -> bool:
    """Return False for other gates, experts weighed otherwise, and one section for the rotations of all layers."""
    values = fields.values
    ropes = fields.section("rope_parameters")
    rope_by_kind = all(isinstance(ropes.get(kind), dict) for kind in values.get("layer_types") or ["full_attention"])
    gates_by_head = values.get("gating", True) in (True, False, "per-head")
    are_sigmoids = values.get("moe_router_score_func", "sigmoid") == "sigmoid" and several_experts(fields)
    are_capped = values.get("moe_router_logit_softcapping")
    return rope_by_kind and gates_by_head and are_sigmoids and not are_capped


def _laguna(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the heads of each layer, and leave out gates if the config does."""
    family = decoder.family
    if not fields.values.get("gating", True):
        family = replace(family, gates=None)
    key = "num_attention_heads_per_layer"
    num_layers = len(decoder.layers)
    counts = [decoder.heads] * num_layers
    if fields.values.get(key) is not None:
        counts = [entry.count(key) for entry in fields.per_layer(key, num_layers)]
    for count in counts:
        check_shared_heads(count, decoder.kv_heads)
    layers = (
        replace(layer, heads=0 if count == decoder.heads else count)
        for layer, count in zip(decoder.layers, counts, strict=True)
    )
    return replace(decoder, family=family, layers=tuple(layers))


# ERNIE 4.5
# Stacks of experts, which may have biases
_EXPERTS = tuple(f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down"))


def _ernie_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of every `moe_layer_interval`-th layer between the first and the last one with experts."""
    values = fields.values
    size = fields.count("moe_intermediate_size" if values.get("moe_intermediate_size") else "intermediate_size")
    shared = fields.count_or_zero("moe_num_shared_experts", default=0)
    corrected = values.get("moe_use_aux_free", True)
    experts = ExpertsConfig(
        *count_experts(fields, "moe_num_experts", "moe_k"),
        size=size,
        normalized=True,
        sigmoid=values.get("moe_gate_act") == "sigmoid",
        correction="moe_statics.e_score_correction_bias" if corrected else None,
        correction_lost=True,
        shared=shared * size,
    )
    first = _ernie_end(values.get("moe_layer_start_index"), min)
    last = _ernie_end(values.get("moe_layer_end_index"), max)
    step = fields.count("moe_layer_interval", default=1)
    stop = layers if last is None or last < 0 else last + 1
    return [experts if (i + 1) % step == 0 and (first or 0) <= i < stop else None for i in range(layers)]


def _ernie_end(stated: object, which: Callable[[Iterable[int]], int]) -> int | None:
    """Return the first or last layer with experts; None if it is not stated.

    Configs of models with images list one for each kind of input.
    """
    if stated is None:
        return None
    listed = stated if isinstance(stated, list) else [stated]
    ends = [end for end in listed if type(end) is int]  # no bool, which is an int for isinstance
    if not ends or len(ends) < len(listed):
        raise CheckpointError(f"config.json: layers with experts begin or end at {stated!r:.60}")
    return which(ends)


# nanochat
_NANOCHAT_NAMES = (
    *GPT_NAMES,
    (".attn.c_q.", ".self_attn.q_proj."),
    (".attn.c_k.", ".self_attn.k_proj."),
    (".attn.c_v.", ".self_attn.v_proj."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)


def _nanochat_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation, by negative angles."""
    rope = replace(full_rope(fields, architecture), backwards=True)
    return rope, rope


def _nanochat(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the norm of embeddings and the cap of logits."""
    cap = fields.optional("final_logit_softcapping", 15.0)
    return replace(decoder, embedding_eps=decoder.norm_eps, logit_softcap=cap)


# PLaMo 3
def _plamo3(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add rotations and windows by a period, and what the norms after both halves are stored without.

    A query sees its own position and `window_size` before it.
    """
    window = fields.count("sliding_window", default=fields.count("window_size", default=2048)) + 1
    period = fields.count("sliding_window_pattern", default=8)
    full = RopeConfig(fields.positive("rope_theta", default=1e6))
    local = RopeConfig(fields.positive("rope_local_theta", default=1e4))
    layers = [
        replace(layer, rope=local, window=window) if (i + 1) % period else replace(layer, rope=full, window=None)
        for i, layer in enumerate(decoder.layers)
    ]
    return replace(decoder, layers=tuple(layers), norm_weight_offset=1.0, branch_offsets=(1 / 5, 5**-1.5))


# Nanbeige
_MAX_LOOPS = 64  # bounds the layers of a hostile config; `gguf.architectures.dense` has the same bound


def _nanbeige(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Repeat the layers of each loop. Checkpoints with a weight for the loss of each further loop state no number."""
    loops = fields.count("num_loops", default=1)
    weights = fields.values.get("loop_loss_weights")
    if isinstance(weights, list) and weights:
        loops = len(weights) + 1
    if loops > _MAX_LOOPS:
        raise UnsupportedModelError(f"config.json: a nanbeige with {loops} loops")
    ends_in_norm = loops > 1 and not fields.values.get("skip_loop_final_norm")
    return replace(decoder, layers=decoder.layers * loops, loops=loops, loop_norm=ends_in_norm)


# IQuest Coder with loops
_LOOP_GATE = re.compile(r"model\.layers\.(\d+)\.(weight|bias)")  # "model.layers.3.weight", after `tensor_names`


def _loop_gate_name(name: str, _config: Mapping[str, Any]) -> str:
    """Return the name of a tensor of gates, which checkpoints have next to the layers."""
    return _LOOP_GATE.sub(r"model.layers.\1.self_attn.loop_gate.\2", name)


def _has_one_rotation(fields: Fields) -> bool:
    """Return False for LongRoPE: gates would have to change with the rotation."""
    scaling = fields.section("rope_scaling")
    return "longrope" not in (scaling.get("rope_type"), scaling.get("type"))


def _second_loop(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the layers of the second loop, whose own entries have a window."""
    window = fields.count("loop_window_size", default=64)
    second = tuple(replace(layer, window=window) for layer in decoder.layers)
    return replace(decoder, layers=(*decoder.layers, *second), loops=2, loop_gates=True)


# Klear
def _klear_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer with some, which a softmax weighs with the expert of all tokens."""
    experts = corrected_experts(fields, "num_experts")
    experts = replace(
        experts,
        stacked="experts",
        correction="expert_bias",
        shared=experts.size * fields.count("n_shared_experts"),
        shared_gate="coefficient",
        weighs_both=True,
    )
    return experts_by_step(fields, layers, experts)


# SmallThinker
_SMALLTHINKER_KEYS = {
    "moe_num_primary_experts": "num_experts", "moe_num_active_primary_experts": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}  # fmt: skip


def _smallthinker_keys(config: Config) -> None:
    """State the sizes of experts under the usual keys."""
    state_usual_names(config, _SMALLTHINKER_KEYS)


def _smallthinker_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer, chosen before attention. A softmax over the chosen ones is normalized."""
    by_softmax = bool(fields.values.get("moe_primary_router_apply_softmax"))
    experts = ExpertsConfig(
        *count_experts(fields, "num_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=by_softmax or bool(fields.values.get("norm_topk_prob", True)),
        router="primary_router",
        stacked="experts",
        sigmoid=not by_softmax,
        routes_early=True,
    )
    return [experts] * layers


def _smallthinker(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the rotations and windows that are listed for each layer: 1 for a layer that has one."""
    count = len(decoder.layers)
    rotates = fields.listed("rope_layout", count) or [1] * count
    slides = fields.listed("sliding_window_layout", count) or [0] * count
    window = fields.count("sliding_window_size") if any(slides) else None
    layers = [
        replace(layer, rope=layer.rope if turned else None, window=window if slid else None)
        for layer, turned, slid in zip(decoder.layers, rotates, slides, strict=True)
    ]
    return replace(decoder, layers=tuple(layers))


ROWS = (
    Architecture(
        "afmoe",
        Family(_AFMOE_NORMS, qk_norm="head", gates="apart"),
        states_head_dim=True,
        position_free="full",
        experts=_afmoe_experts,
        runs=_has_windows,
        complete=_afmoe,
        biases={},
    ),
    Architecture(
        "apertus",
        Family(NormNames("attention_layernorm", None, "feedforward_layernorm"), "xielu", "head"),
        constants={"mlp_bias": False, "post_norm": False, "qk_norm": True},
        activations=("xielu",),
        only={"post_norm": False, "qk_norm": True},
    ),
    Architecture("ernie4_5", Family(interleaved=True), biases={"use_bias": (*ATTENTION, *FEED_FORWARD)}),
    Architecture(
        "ernie4_5_moe",
        Family(interleaved=True),
        experts=_ernie_experts,
        runs=lambda fields: fields.values.get("rope_scaling") is None,
        biases={"use_bias": (*ATTENTION, *FEED_FORWARD, *_EXPERTS)},
        loses_corrections=True,
    ),
    Architecture(
        "exaone",
        Family(),
        older_keys={"num_layers": "num_hidden_layers"},
        add_keys=_exaone_keys,
        states_head_dim=True,
        tensor_names=_EXAONE_NAMES,
        tied=True,
        eps="layer_norm_epsilon",
        activation_key="activation_function",
    ),
    Architecture(
        "exaone4",
        Family(AFTER, qk_norm="head"),
        add_keys=_exaone4_keys,
        states_head_dim=True,
        sliding="period",
        window_switches=("layer_types", "sliding_window_pattern"),
        position_free="full",
    ),
    Architecture(
        "exaone_moe",
        Family(qk_norm="head"),
        add_keys=_exaone_moe_keys,
        states_head_dim=True,
        dense_first=True,
        tensor_names=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        theta=1e6,
        position_free="full",
        experts=_exaone_moe_experts,
        runs=_has_windows,
        plain=(".mlp.gate",),
    ),
    Architecture(
        "gpt_oss",
        Family(activation="clamped"),
        sliding="even",
        experts=equal_experts("num_local_experts", normalized=True, router="router", stacked="experts"),
        complete=_gpt_oss,
        biases={},
        biased=(*ATTENTION, "mlp.router", *(f"mlp.experts.{name}_proj" for name in ("gate", "up", "down"))),
    ),
    Architecture(
        "bitnet",
        Family(activation="gated_relu2", inner_norms=True),
        tied=True,
        activations=("relu2",),
    ),
    Architecture(
        "iquestloopcoder",
        Family(),
        context=131072,
        tensor_names=(("model.gate_projections.", "model.layers."),),
        rename=_loop_gate_name,
        only={"loop_num": 2},
        theta=5e5,
        runs=_has_one_rotation,
        complete=_second_loop,
    ),
    Architecture(
        "Klear",
        Family(qk_norm="head"),
        experts=_klear_experts,
        runs=several_experts,
        biases={"attention_bias": ATTENTION},
        biased=("mlp.coefficient",),
    ),
    Architecture(
        "laguna",
        Family(qk_norm="head", gates="head_softplus"),
        tensor_names=(
            (".self_attn.g_proj.", ".self_attn.gate_proj."),
            (".mlp.gate.proj.", ".mlp.gate."),
            (".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        ),
        rotated=1.0,
        ropes=ropes_by_kind,
        experts=_laguna_experts,
        runs=_laguna_runs,
        biases={"qkv_bias": QKV, "attention_bias": ("self_attn.o_proj",)},
        complete=_laguna,
    ),
    Architecture(
        "spark2_5",
        Family(activation="gated_erf_gelu", gates="head_sigmoids"),
        defaults={"rms_norm_eps": 1e-6},
        tensor_names=(
            ("model.embedding.", "model.embed_tokens."),
            (".self_attn.q_k_v_proj.", ".self_attn.qkv_proj."),
            (".self_attn.g_proj.", ".self_attn.gate_proj."),
            (".self_attn.out_proj.", ".self_attn.o_proj."),
        ),
        is_unread=lambda name, _config: ".rotary_emb." in name,
        context=8192,
        tied=True,
        activations=("gelu",),
        only={"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True},
        rotated=1.0,
        ropes=ropes_by_kind,
        sliding="period",
        period=4,
        biases={"attention_bias": (*ATTENTION, "self_attn.gate_proj"), "mlp_bias": FEED_FORWARD},
        plain=(".self_attn.gate_proj",),
    ),
    Architecture(
        "nanbeige",
        Family(),
        only={"enable_double_loop_split": False, "loop_share_kv": False, "enable_depth_attention": False},
        complete=_nanbeige,
    ),
    Architecture(
        "nanochat",
        Family(activation="relu2", qk_norm="unit", norm_last=True, norm_weights=False),
        defaults={"rms_norm_eps": 1e-6},
        tensor_names=_NANOCHAT_NAMES,
        activations=("relu2",),
        ropes=_nanochat_ropes,
        complete=_nanochat,
    ),
    Architecture(
        "plamo3",
        Family(NormNames("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"), qk_norm="head"),
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
        tensor_names=(("model.layers.layers.", "model.layers."), (".mixer.", ".self_attn.")),
        tied=True,
        only={"linear_type": "normal"},
        complete=_plamo3,
    ),
    Architecture(
        "smallthinker",
        Family(activation="gated_relu"),
        add_keys=_smallthinker_keys,
        tensor_names=(
            (".block_sparse_moe.", ".mlp."),
            (".gate.", ".gate_proj."),
            (".up.", ".up_proj."),
            (".down.", ".down_proj."),
        ),
        activation_key=None,
        only={"moe_enable_early_router": True, "moe_enable_secondary_experts": False},
        inner_size=lambda fields: fields.count("moe_intermediate_size"),  # all layers have experts
        experts=_smallthinker_experts,
        complete=_smallthinker,
    ),
    Architecture("phi3", Family(), rotated=1.0, ropes=_phi3_ropes, sliding="all"),
    *(Architecture(name, nests=True) for name in _CONTAINERS),
)  # fmt: skip
