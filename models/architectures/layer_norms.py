"""Families with LayerNorm: Phi-2, Phi MoE, StarCoder, StableLM, Nemotron 4, Falcon, GPT-2, GPT-NeoX, GPT-J, DBRX.

A family has a section here: its names of tensors, then the functions of its row. The rows follow at the end.

tests/parity/test_mlx_lm_families.py compares logits; tests/models/architectures/test_config.py guards the refusals.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.models.architectures.architecture import ATTENTION, GPT_NAMES, QKV, Architecture, Config
from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertLayers,
    ExpertsConfig,
    Family,
    NormNames,
    RopeConfig,
)
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import full_rope, head_size, state_usual_names
from headrace.models.architectures.llama import EXPERT_NAMES
from headrace.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import mlx.core as mx

# One norm for attention and feed-forward, which have the same input
SHARED_NORM = NormNames("input_layernorm", None, "input_layernorm")
# A feed-forward without a gate
_UNGATED = ("mlp.up_proj", "mlp.down_proj")
# Names of GELU that the config may state; `read.decoder_config` takes erf or tanh by them.
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")


def _inner_size(fields: Fields) -> int:
    """Return the width of feed-forwards: four times the model's, unless the config states it."""
    default = fields.count("intermediate_size", default=4 * fields.count("hidden_size"))
    return fields.count("n_inner", default=default)


def equal_heads(config: Config) -> None:
    """State as many K/V heads as heads, which together are as wide as the model, as the classes have."""
    width = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    config["num_key_value_heads"] = heads
    if type(width) is int and type(heads) is int:
        config["head_dim"] = width // max(heads, 1)


# Phi-2 and StableLM
def _has_qk_norms(fields: Fields) -> bool:
    """Return whether queries and keys have LayerNorms."""
    return bool(fields.values.get("qk_layernorm"))


def _complete_stablelm(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Remove the norms of queries and keys, or make attention and feed-forward parallel, as the config states."""
    family = decoder.family
    if not _has_qk_norms(fields):
        family = replace(family, qk_norm=None)
    if fields.values.get("use_parallel_residual"):
        family = replace(family, norms=SHARED_NORM, parallel=True)
    return replace(decoder, family=family)


# Phi MoE
def _phimoe_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation, with the stated amplitude of both of LongRoPE's variants."""
    rope = full_rope(fields, architecture, older_names=("su",))
    if rope.scaling is not None:
        scaling = {**rope.scaling, "attention_factor": rope.scaling.get("long_mscale")}
        rope = RopeConfig(rope.theta, rope.kind, scaling)
    return rope, rope


def _phimoe_runs(fields: Fields) -> bool:
    """Return False for another amplitude within the original context."""
    scaling = fields.section("rope_scaling")
    return scaling.get("short_mscale") == scaling.get("long_mscale")


def _phimoe_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer, which are alike."""
    counts = count_experts(fields, "num_local_experts")
    band = fields.positive("router_jitter_noise", default=0.01)
    experts = ExpertsConfig(*counts, size=fields.count("intermediate_size"), normalized=False, band=band)
    return [experts] * layers


# GPT-NeoX
_NEOX_NAMES = (
    ("model.embed_in.", "model.embed_tokens."),
    ("model.embed_out.", "lm_head."),
    ("model.h.", "model.layers."),
    ("model.final_layer_norm.", "model.norm."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)


def _neox_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation, by the family's own names or by those of transformers 5."""
    values = fields.values
    # The row's `older_keys` add the family's own names to a config with the newer ones, since mlx-lm's class reads the
    # family's. They add nothing the other way: an older config has no newer names, and `full_rope` reads only those.
    theta = values.get("rotary_emb_base", values.get("rope_theta"))
    rotated = Fields({"share": values.get("rotary_pct", values.get("partial_rotary_factor"))})
    share = rotated.positive("share", default=0.25)
    rope = full_rope(Fields({**values, "rope_theta": theta}), architecture, share=share)
    return rope, rope  # of full and of sliding layers


def _complete_neox(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """State whether attention and feed-forward have the same input."""
    parallel = bool(fields.values.get("use_parallel_residual", True))
    return replace(decoder, family=replace(decoder.family, parallel=parallel))


# Falcon
_FALCON_NAMES = (
    ("model.word_embeddings.", "model.embed_tokens."),
    ("model.h.", "model.layers."),
    ("model.ln_f.", "model.norm."),
    (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".ln_attn.", ".input_layernorm."),
    (".ln_mlp.", ".post_attention_layernorm."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)


def _falcon_keys(config: Config) -> None:
    """Add the usual names of sizes. Older layers have one K/V head, unless the config says otherwise."""
    heads = config.get("num_attention_heads")
    if config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = config.get("num_kv_heads") or heads
    elif config.get("multi_query", True):
        config["num_key_value_heads"] = 1
    else:
        config["num_key_value_heads"] = heads
    if config.get("ffn_hidden_size") is not None:
        config["intermediate_size"] = config["ffn_hidden_size"]


def _complete_falcon(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Choose the norms: newer layers have one for attention and one for the feed-forward."""
    values = fields.values
    norms = SHARED_NORM
    if values.get("new_decoder_architecture") and values.get("num_ln_in_parallel_attn") != 1:
        norms = NormNames()
    return replace(decoder, family=replace(decoder.family, norms=norms))


def _falcon_runs(fields: Fields) -> bool:
    """Return False for ALiBi, and for older layers with one half after the other."""
    values = fields.values
    parallel = bool(values.get("new_decoder_architecture") or values.get("parallel_attn", True))
    return parallel and not values.get("alibi")


# GPT-J
_GPTJ_NAMES = (
    *GPT_NAMES,
    (".attn.", ".self_attn."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".mlp.fc_in.", ".mlp.up_proj."),
    (".mlp.fc_out.", ".mlp.down_proj."),
)


def _gptj_keys(config: Config) -> None:
    """Add the usual names of sizes."""
    names = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    state_usual_names(config, names)
    equal_heads(config)


def _gptj_ropes(fields: Fields, _architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation of the first `rotary_dim` dimensions of a head; of all for 0 or null."""
    dims = head_size(fields)
    rotated = dims
    if fields.values.get("rotary_dim", 64):
        rotated = fields.count("rotary_dim", default=64)
    rope = RopeConfig(1e4, share=rotated / dims)
    return rope, rope


# GPT-2 and StarCoder 1
_GPT2_NAMES = (
    *GPT_NAMES,
    ("model.wpe.", "model.embed_positions."),
    (".attn.c_attn.", ".self_attn.qkv_proj."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
_GPT2_ONLY = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def _starcoder_keys(config: Config) -> None:
    """Add the usual names of sizes. Queries of all heads have one K/V head, unless the config says otherwise."""
    _gptj_keys(config)
    if config.get("multi_query") is not False:
        config["num_key_value_heads"] = 1


def _add_positions(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """State the rows of the table of position embeddings."""
    return replace(decoder, positions=fields.count("n_positions"))


def _transpose_gpt2_weights(arrays: "dict[str, mx.array]", fields: Fields) -> "dict[str, mx.array]":
    """Return the arrays with matrices as (outputs, inputs). GPT-2's own checkpoints have (inputs, outputs)."""
    # The layout is told by the shape of this matrix, which is not square as that of attention's output.
    up_projection = arrays.get("model.layers.0.mlp.up_proj.weight")
    if up_projection is None or up_projection.shape[0] != fields.count("hidden_size"):
        return arrays
    return {name: array.swapaxes(0, 1) if name.endswith("_proj.weight") else array for name, array in arrays.items()}


# DBRX
_DBRX_NAMES = (
    ("model.blocks.", "model.layers."),
    ("model.wte.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    (".norm_attn_norm.norm_1.", ".input_layernorm."),
    (".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
    (".norm_attn_norm.attn.Wqkv.", ".self_attn.qkv_proj."),
    (".norm_attn_norm.attn.out_proj.", ".self_attn.o_proj."),
    (".ffn.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".v1.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def _dbrx_keys(config: Config) -> None:
    """Add the usual names of sizes, and of those in sections."""
    names = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    state_usual_names(config, names)
    equal_heads(config)
    sections = {
        "attn_config": {"kv_n_heads": "num_key_value_heads", "rope_theta": "rope_theta"},
        "ffn_config": {"ffn_hidden_size": "intermediate_size"},
    }
    for section, section_names in sections.items():
        stated = config.get(section)
        if isinstance(stated, dict):
            config |= {usual: stated[name] for name, usual in section_names.items() if name in stated}


def _dbrx_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of all layers. Raises UnsupportedModelError for others than mlx-lm's class has."""
    section = Fields(fields.section("ffn_config"))
    activation = section.section("ffn_act_fn").get("name", "silu")
    norm = section.values.get("moe_normalize_expert_weights", 1)
    if activation != "silu" or norm != 1:
        raise UnsupportedModelError(f"config.json: a dbrx with the activation {activation!r} or weights by {norm!r}")
    counts = count_experts(section, "moe_num_experts", "moe_top_k")
    size = section.count("ffn_hidden_size")
    return [ExpertsConfig(*counts, size=size, normalized=True, router="router.layer")] * layers


def _bound_qkv(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Bound queries, keys and values where the config says so."""
    section = Fields(fields.section("attn_config"))
    if section.values.get("clip_qkv") is None:
        return decoder
    return replace(decoder, qkv_bound=section.positive("clip_qkv"))


ROWS = (
    Architecture(
        "phi",
        Family(SHARED_NORM, "tanh_gelu", norm="layer", norm_bias=True, parallel=True),
        defaults={"partial_rotary_factor": 0.5},
        tensor_names=(
            (".self_attn.dense.", ".self_attn.o_proj."),
            (".mlp.fc1.", ".mlp.up_proj."),
            (".mlp.fc2.", ".mlp.down_proj."),
            ("model.final_layernorm.", "model.norm."),
        ),
        eps="layer_norm_eps",
        activations=_GELU,
        rotated=0.4,
        runs=lambda fields: not _has_qk_norms(fields),
        biases={},
        biased=(*ATTENTION, *_UNGATED, "lm_head"),
    ),
    Architecture(
        "starcoder2",
        Family(activation="erf_gelu", norm="layer", norm_bias=True),
        tensor_names=((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj.")),
        tied=True,
        eps="norm_epsilon",
        activations=_GELU,
        only={"use_bias": True},
        theta=1e5,
        sliding="all",
        biases={},
        biased=(*ATTENTION, *_UNGATED),
    ),
    Architecture(
        "stablelm",
        Family(norm="layer", norm_bias=True, qk_norm="layer"),
        tensor_names=((".q_layernorm.", ".q_norm."), (".k_layernorm.", ".k_norm.")),
        eps="layer_norm_eps",
        rotated=0.25,
        biases={"use_qkv_bias": QKV},
        complete=_complete_stablelm,
    ),
    Architecture(
        "phimoe",
        Family(norm="layer", norm_bias=True),
        tensor_names=EXPERT_NAMES,
        sliding="all",
        ropes=_phimoe_ropes,
        experts=_phimoe_experts,
        runs=_phimoe_runs,
        biases={},
        biased=(*ATTENTION, "lm_head"),
    ),
    Architecture(
        "nemotron",
        Family(activation="relu2", norm="layer", norm_bias=True),
        eps="norm_eps",
        activations=("relu2",),
        rotated=0.5,
        complete=lambda _fields, decoder: replace(decoder, norm_weight_offset=1.0),
    ),
    Architecture(
        "gpt_neox",
        Family(activation="erf_gelu", norm="layer", norm_bias=True, by_kv_head=True),
        older_keys={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        add_keys=equal_heads,
        tensor_names=_NEOX_NAMES,
        is_unread=lambda name, _config: name.endswith((".attention.bias", ".masked_bias", ".inv_freq")),
        eps="layer_norm_eps",
        activations=_GELU,
        rotated=0.25,
        ropes=_neox_ropes,
        inner_size=_inner_size,
        biases={},
        biased=("self_attn.qkv_proj", "self_attn.o_proj", *_UNGATED),
        complete=_complete_neox,
    ),
    Architecture(
        "falcon",
        Family(activation="erf_gelu", norm="layer", norm_bias=True, parallel=True, by_kv_head=True),
        defaults={"layer_norm_epsilon": 1e-5},
        add_keys=_falcon_keys,
        tensor_names=_FALCON_NAMES,
        context=2048,
        tied=True,
        eps="layer_norm_epsilon",
        activations=("gelu",),
        activation_key="activation",
        inner_size=_inner_size,
        runs=_falcon_runs,
        biases={"bias": ("self_attn.qkv_proj", "self_attn.o_proj", *_UNGATED)},
        complete=_complete_falcon,
    ),
    Architecture(
        "gptj",
        Family(SHARED_NORM, "tanh_gelu", norm="layer", norm_bias=True, parallel=True, interleaved=True),
        defaults={"layer_norm_epsilon": 1e-5, "vocab_size": 50400},
        add_keys=_gptj_keys,
        tensor_names=_GPTJ_NAMES,
        is_unread=lambda name, _config: name.endswith((".attn.bias", ".masked_bias")),
        context=2048,
        eps="layer_norm_epsilon",
        activations=_GELU,
        activation_key="activation_function",
        rotated=1.0,
        ropes=_gptj_ropes,
        inner_size=_inner_size,
        biases={},
        biased=(*_UNGATED, "lm_head"),
    ),
    Architecture(
        "gpt2",
        Family(activation="tanh_gelu", norm="layer", norm_bias=True),
        defaults={"layer_norm_epsilon": 1e-5},
        older_keys={"n_ctx": "n_positions"},
        add_keys=_gptj_keys,
        tensor_names=_GPT2_NAMES,
        is_unread=lambda name, _config: name.endswith((".attn.bias", ".masked_bias")),
        turn=_transpose_gpt2_weights,
        tied=True,
        eps="layer_norm_epsilon",
        activations=("gelu_new", *_GELU),
        activation_key="activation_function",
        only={"tie_word_embeddings": True, **_GPT2_ONLY},
        rotates=lambda _fields: False,
        inner_size=_inner_size,
        biases={},
        biased=(*ATTENTION, *_UNGATED),
        complete=_add_positions,
    ),
    Architecture(
        "gpt_bigcode",
        Family(activation="tanh_gelu", norm="layer", norm_bias=True),
        defaults={"layer_norm_epsilon": 1e-5},
        add_keys=_starcoder_keys,
        tensor_names=_GPT2_NAMES,
        is_unread=lambda name, _config: name.endswith((".attn.bias", ".masked_bias")),
        tied=True,
        eps="layer_norm_epsilon",
        activations=("gelu_pytorch_tanh", *_GELU),
        activation_key="activation_function",
        only=_GPT2_ONLY,
        rotates=lambda _fields: False,
        inner_size=_inner_size,
        biases={},
        biased=(*ATTENTION, *_UNGATED),
        complete=_add_positions,
    ),
    Architecture(
        "dbrx",
        Family(norm="layer"),
        constants={"layer_norm_eps": 1e-5},
        add_keys=_dbrx_keys,
        tensor_names=_DBRX_NAMES,
        context=2048,
        eps="layer_norm_eps",
        only={"rope_scaling": None},
        experts=_dbrx_experts,
        biases={},
        complete=_bound_qkv,
    ),
)
