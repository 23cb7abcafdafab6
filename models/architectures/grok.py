"""Grok 1 and 2: experts, in Grok 2 next to a dense feed-forward, and scores and logits with soft caps.

Neither mlx-lm nor transformers has a class of them: their GGUF files run, whose converter names entries so.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/models/gguf/test_layered.py, which compares logits with those of llama.cpp.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, ExpertsConfig, Family, NormNames
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields

_NORMS = NormNames("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer. Grok 2 adds a dense feed-forward, and divides the sum by the root of two."""
    has_dense = bool(fields.values.get("residual_moe"))
    share = 0.5**0.5 if has_dense else 1.0
    experts = ExpertsConfig(
        *count_experts(fields, "num_local_experts"),
        size=fields.count("moe_intermediate_size"),
        normalized=True,
        scale=share,
        shared=fields.count("intermediate_size") if has_dense else 0,
        shared_at="",
        shared_scale=share,
    )
    return [experts] * layers


def _grok(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the factors and soft caps."""
    caps_logits = fields.values.get("final_logit_softcapping") is not None
    return replace(
        decoder,
        attention_scale=fields.positive("attn_output_multiplier"),
        attention_softcap=fields.positive("attn_logit_softcapping"),
        embedding_scale=fields.positive("embedding_multiplier_scale"),
        logit_scale=fields.positive("output_multiplier_scale"),
        logit_softcap=fields.positive("final_logit_softcapping") if caps_logits else None,
    )


ROWS = (
    Architecture(
        "grok",
        Family(_NORMS, activation="gelu"),
        activation_key=None,
        inner_size=lambda fields: fields.count("moe_intermediate_size"),  # all layers have experts
        experts=_experts,
        complete=_grok,
    ),
)
