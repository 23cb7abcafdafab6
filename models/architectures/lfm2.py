"""LFM2: short convolutions between layers of attention, dense or with experts.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from headrace.models.architectures.architecture import BIASES, MIXER, Architecture
from headrace.models.architectures.config import ExpertLayers, ExpertsConfig, Family, MixerConfig
from headrace.models.architectures.experts import count_experts, several_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.mixers import mixer_sizes

_NAMES = (
    (".conv.conv.", ".mixer.conv1d."), (".conv.", ".mixer."), (".self_attn.out_proj", ".self_attn.o_proj"),
    ("_layernorm.", "_norm."), (".operator_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."),
    ("model.embedding_norm", "model.norm"),
)  # fmt: skip


def _short_convolution(fields: Fields) -> MixerConfig:
    """Return the gated short convolution, which has no recurrence: one head as wide as the model."""
    sizes = mixer_sizes(
        "conv",
        heads=1,
        key_heads=0,
        key_dim=0,
        value_dim=fields.count("hidden_size"),
        width=fields.count("conv_L_cache"),
    )
    return MixerConfig(sizes, fields.positive("norm_eps"))


def _inner_size(fields: Fields) -> int:
    """Return the width of feed-forwards: as stated, or two thirds of that times a factor, rounded up to a multiple."""
    size = fields.count("block_ff_dim")  # in newer configs `intermediate_size`, which `older_keys` copies to this key
    multiple = fields.count("block_multiple_of", default=256)
    if not fields.values.get("block_auto_adjust_ff_dim"):
        return size
    size = int(fields.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of all layers; the first ones are dense."""
    experts = ExpertsConfig(
        *count_experts(fields, "num_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=bool(fields.values.get("norm_topk_prob")),
        sigmoid=True,
        correction="expert_bias" if fields.values.get("use_expert_bias") else None,
        scale=fields.positive("routed_scaling_factor", default=1.0),
    )
    dense = fields.count_or_zero("num_dense_layers")
    return [None if i < dense else experts for i in range(layers)]


_BIASES = {**BIASES, "conv_bias": (*MIXER, "mixer.conv1d")}

ROWS = (
    Architecture("lfm2_vl", nests=True),
    Architecture("lfm2-vl", nests=True),
    Architecture(
        "lfm2",
        Family(qk_norm="head"),
        older_keys={"block_dim": "hidden_size", "block_ff_dim": "intermediate_size"},
        tensor_names=_NAMES,
        tied=True,
        eps="norm_eps",
        theta=1e6,
        inner_size=_inner_size,
        mixer=_short_convolution,
        biases=_BIASES,
    ),
    Architecture(
        "lfm2_moe",
        Family(qk_norm="head"),
        tensor_names=_NAMES,
        tied=True,
        eps="norm_eps",
        theta=1e6,
        experts=_experts,
        mixer=_short_convolution,
        biases=_BIASES,
        runs=several_experts,
    ),
)
