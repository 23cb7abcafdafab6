"""OLMo 2, 3, hybrid and OLMoE: one norm over all heads of queries or keys, and norms after attention.

OLMoE, and the hybrid's recurrent layers, have the usual norms before each half of a layer instead.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.config import (
    ExpertLayers,
    ExpertsConfig,
    Family,
    MixerConfig,
    NormNames,
    RopeConfig,
)
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import full_rope
from headrace.models.architectures.mixers import gated_delta, recurrent_by_interval

# Attention and feed-forward get the residual stream as it is. Their outputs are normalized before they are added.
AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _olmo3_ropes(fields: Fields, architecture: Architecture) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations: scaling is of full-attention layers only."""
    rope = full_rope(fields, architecture)
    return rope, RopeConfig(rope.theta)


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer, which are alike."""
    counts = count_experts(fields, "num_experts")
    normalized = bool(fields.values.get("norm_topk_prob"))
    return [ExpertsConfig(*counts, size=fields.count("intermediate_size"), normalized=normalized)] * layers


def _mixer(fields: Fields) -> MixerConfig:
    """Return the gated delta network. Betas are twice a sigmoid if eigenvalues of its transitions may be negative."""
    max_beta = 2.0 if fields.values.get("linear_allow_neg_eigval", True) else 1.0
    eps = fields.positive("layer_norm_epsilon", default=1e-5)
    return replace(gated_delta(fields), eps=eps, apart=True, most_beta=max_beta)


def _states_theta(fields: Fields) -> bool:
    """Return whether attention rotates: only with a stated base."""
    nested = fields.section("rope_parameters")
    if "rope_theta" in nested:
        return nested["rope_theta"] is not None
    return fields.values.get("rope_theta") is not None


ROWS = (
    Architecture("olmo2", Family(AFTER, qk_norm="heads"), tied=True),
    Architecture("olmo3", Family(AFTER, qk_norm="heads"), sliding="period", period=4, ropes=_olmo3_ropes),
    Architecture("olmoe", Family(qk_norm="heads"), experts=_experts, only={"clip_qkv": None}),
    Architecture(
        "olmo_hybrid",
        Family(AFTER, qk_norm="heads", mixer_norms=NormNames()),  # recurrent layers normalize before each half instead
        tensor_names=(
            # The two names that differ come before the rule for all others of the mixer.
            (".linear_attn.o_proj", ".mixer.out_proj"),
            (".linear_attn.o_norm", ".mixer.norm"),
            (".linear_attn.", ".mixer."),
            # The norms of recurrent layers, which have names of their own.
            (".attention_layer_norm.", ".input_layernorm."),
            (".feedforward_layer_norm.", ".post_attention_layernorm."),
        ),
        rotates=_states_theta,
        mixer=_mixer,
        recurrent=recurrent_by_interval,
    ),
)
