"""Qwen 1 to 3.5: dense layers, mixtures, and gated delta networks between layers of gated attention.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import GPT_NAMES, QKV, Architecture, Config, HeadNames
from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertLayers,
    ExpertsConfig,
    Family,
    MixerConfig,
    RopeConfig,
)
from headrace.models.architectures.experts import count_experts, experts_by_step
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layer_norms import equal_heads
from headrace.models.architectures.layers import full_rope, ropes_by_kind
from headrace.models.architectures.mixers import gated_delta, recurrent_by_interval

_WINDOWS = ("use_sliding_window",)
# Defaults of transformers' classes, which multimodal configs omit from the section of their text part
_VL3 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128000,
}  # fmt: skip
_VL25 = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
}  # fmt: skip

# Qwen 3.5 and Qwen3-Next: three gated delta networks, then a layer of gated attention
_GATED = Family(qk_norm="head", gates="joined")
_DELTA_NAMES = (
    (".linear_attn.", ".mixer."),
    (".experts.gate_up_proj", ".switch_mlp.input_linear.weight"),
    (".experts.down_proj", ".switch_mlp.down_proj.weight"),
)
_HEAD = HeadNames(
    prefix="mtp.",
    layer="layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    centred=True,
)


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    experts = ExpertsConfig(
        *count_experts(fields, "num_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=bool(fields.values.get("norm_topk_prob")),
    )
    return experts_by_step(fields, layers, experts)


def _next_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return `_experts` with the expert that all tokens use."""
    stated = _experts(fields, layers)
    return [None if experts is None else _with_gated_expert(fields, experts) for experts in stated]


def _qwen35_experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer, which are alike; none for a dense model."""
    if not fields.values.get("num_experts"):
        return [None] * layers
    counts = count_experts(fields, "num_experts")
    size = fields.count("moe_intermediate_size")
    normalized = bool(fields.values.get("norm_topk_prob", True))
    return [_with_gated_expert(fields, ExpertsConfig(*counts, normalized, size=size))] * layers


def _with_gated_expert(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add the expert that all tokens use, times its gate."""
    shared = fields.count("shared_expert_intermediate_size")
    return replace(experts, shared=shared, shared_at="shared_expert", shared_gate="shared_expert_gate")


def _next_mixer(fields: Fields) -> MixerConfig:
    """Return Qwen3-Next's mixer, whose projections are joined, with the rows of each key head together."""
    return replace(gated_delta(fields), by_key_head=True)


def _centred_norms(_fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """State that norms are stored minus one."""
    return replace(decoder, norm_weight_offset=1.0)


# A stack of gates and ups that is stored as one; its layout shows in its shape (`models.network.stacks`).
_JOINED_EXPERTS = (
    (".experts.gate_up_proj", ".switch_mlp.gate_up_proj"),
    (".experts.down_proj", ".switch_mlp.down_proj"),
)


def _vl_experts(config: Config) -> None:
    """Add the usual key of the number of experts."""
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])


# Qwen 1
def _first_keys(config: Config) -> None:
    """Add the sizes of heads, and end the context where scaling of rotation and of scores would begin."""
    equal_heads(config)
    trained = config.get("seq_length")
    longest = config.get("max_position_embeddings")
    if type(trained) is int and type(longest) is int:
        config["max_position_embeddings"] = min(trained, longest)


def _first_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotation, by the family's own name of its base or by the usual one."""
    theta = fields.values.get("rotary_emb_base", fields.values.get("rope_theta"))
    rope = full_rope(Fields({**fields.values, "rope_theta": theta}), architecture, share=1.0)
    return rope, rope


def _first_runs(fields: Fields) -> bool:
    """Return False with biases, and for heads that are not as wide as the model together: they have another scale."""
    width = fields.count("hidden_size") // fields.count("num_attention_heads")
    return fields.count("kv_channels", default=128) == width and bool(fields.values.get("no_bias", True))


_FIRST_NAMES = (
    *GPT_NAMES,
    (".attn.c_attn.", ".self_attn.qkv_proj."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".mlp.w1.", ".mlp.up_proj."),
    (".mlp.w2.", ".mlp.gate_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)

ROWS = (
    Architecture(
        "qwen",
        Family(),
        defaults={"layer_norm_epsilon": 1e-6},
        add_keys=_first_keys,
        tensor_names=_FIRST_NAMES,
        is_unread=lambda name, _config: name.endswith(".inv_freq"),
        eps="layer_norm_epsilon",
        ropes=_first_ropes,
        inner_size=lambda fields: fields.count("intermediate_size") // 2,
        runs=_first_runs,
        biases={},
        biased=QKV,
    ),
    Architecture(
        "qwen2", Family(), sliding="tail", window_switches=_WINDOWS, context=32768, biases={}, biased=QKV,
    ),
    Architecture(
        "qwen2_moe",
        Family(),
        sliding="tail",
        window_switches=_WINDOWS,
        context=32768,
        experts=_next_experts,
        biases={}, biased=QKV,
    ),
    Architecture("qwen3", Family(qk_norm="head"), sliding="tail", window_switches=_WINDOWS, context=32768),
    Architecture(
        "qwen3_moe",
        Family(qk_norm="head"),
        sliding="all",
        window_switches=_WINDOWS,
        older_keys={"num_experts": "num_local_experts"},
        states_head_dim=True,
        tensor_names=_JOINED_EXPERTS,
        experts=_experts,
    ),
    Architecture(
        "qwen3_next",
        _GATED,
        defaults={"norm_topk_prob": True},
        period_key="full_attention_interval",
        only_periodic=True,
        tensor_names=_DELTA_NAMES,
        head=_HEAD,
        rotated=0.25,
        window_switches=_WINDOWS,
        mixer=_next_mixer,
        recurrent=recurrent_by_interval,
        experts=_next_experts,
        complete=_centred_norms,
        class_splits=("pipeline",),
    ),
    *(
        Architecture(
            name,
            _GATED,
            period_key="full_attention_interval",
            only_periodic=True,
            nests=True,
            tensor_names=_DELTA_NAMES,
            head=_HEAD,
            rotated=0.25,
            window_switches=_WINDOWS,
            # `default=default` keeps each row's own value: all functions of a loop see the last one.
            inner_size=lambda fields, default=default: fields.count("intermediate_size", default=default),  # type: ignore[misc]
            mixer=gated_delta,
            recurrent=recurrent_by_interval,
            experts=_qwen35_experts,
            complete=_centred_norms,
            class_splits=("tensor", "pipeline"),
        )
        for name, default in (("qwen3_5", None), ("qwen3_5_moe", 1))  # all layers of the mixture have experts
    ),
    Architecture("qwen3_5_text", same_as="qwen3_5", head=_HEAD),
    Architecture("qwen3_5_moe_text", same_as="qwen3_5_moe", head=_HEAD),
    Architecture(  # Mellum 2: the layers of Qwen's mixture, most of them with a window
        "mellum", Family(qk_norm="head"), older_keys={"num_experts": "num_local_experts"}, ropes=ropes_by_kind,
        experts=_experts,
    ),
    Architecture("qwen3_vl", nests=True),
    Architecture("qwen3_vl_text", layers_of="qwen3", nested_defaults=_VL3),
    Architecture("qwen3_vl_moe", nests=True),
    Architecture(
        "qwen3_vl_moe_text", layers_of="qwen3_moe", constants={"norm_topk_prob": True}, add_keys=_vl_experts
    ),
    Architecture("qwen2_5_vl", nests=True),
    Architecture("qwen2_5_vl_text", layers_of="qwen2", nested_defaults=_VL25),
    Architecture("qwen2_vl", nests=True),
    Architecture("qwen2_vl_text", layers_of="qwen2"),
    # Omni models: the text part of the thinker, which `checkpoint.normalize` takes out of its section
    Architecture("qwen3_omni_moe", nests=True),
    Architecture("qwen3_omni_moe_thinker", nests=True),
    Architecture("qwen3_omni_moe_text", layers_of="qwen3_moe", nested_defaults={"norm_topk_prob": True}),
    Architecture("qwen2_5_omni", nests=True),
    Architecture("qwen2_5_omni_thinker", nests=True),
    Architecture("qwen2_5_omni_text", layers_of="qwen2"),
)  # fmt: skip
