"""Families with LayerNorm: Command R and Command A, Phi-2, StarCoder 2, StableLM and Nemotron 4."""

from dataclasses import replace

from headrace.models.architectures.architecture import ATTENTION, QKV, Architecture
from headrace.models.architectures.config import DecoderConfig, Family, NormNames
from headrace.models.architectures.fields import Fields

# One norm for attention and feed-forward, which have the same input
_ONE = NormNames("input_layernorm", None, "input_layernorm")
_COHERE = Family(_ONE, interleaved=True, norm="layer", parallel=True)
_UNGATED = ("mlp.up_proj", "mlp.down_proj")
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")


def _cohere(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    family = replace(decoder.family, norm_bias=bool(fields.values.get("layer_norm_bias")))
    return replace(decoder, family=family, logit_scale=fields.positive("logit_scale", default=0.0625))


def _stablelm(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    if not fields.values.get("use_parallel_residual"):
        return decoder
    return replace(decoder, family=replace(decoder.family, norms=_ONE, parallel=True))


def _norms_of_heads(fields: Fields) -> bool:
    return bool(fields.values.get("qk_layernorm"))


ROWS = (
    Architecture(
        "cohere",
        _COHERE,
        context=8192,
        tied=True,
        eps="layer_norm_eps",
        only={"tie_word_embeddings": True},
        theta=8e6,
        runs=lambda fields: not fields.values.get("use_qk_norm"),  # one norm for all heads, with weights of each
        complete=_cohere,
    ),
    Architecture(
        "cohere2",
        _COHERE,
        defaults={"sliding_window": 4096},
        period_key="sliding_window_pattern",
        only_periodic=True,
        tied=True,
        eps="layer_norm_eps",
        sliding="period",
        period=4,
        position_free="full",
        complete=_cohere,
    ),
    Architecture(
        "phi",
        Family(_ONE, "tanh_gelu", norm="layer", norm_bias=True, parallel=True),
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
        runs=lambda fields: not _norms_of_heads(fields),
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
        Family(norm="layer", norm_bias=True),
        eps="layer_norm_eps",
        rotated=0.25,
        runs=lambda fields: not _norms_of_heads(fields),
        biases={"use_qkv_bias": QKV},
        complete=_stablelm,
    ),
    Architecture(
        "nemotron",
        Family(activation="relu2", norm="layer", norm_bias=True),
        eps="norm_eps",
        activations=("relu2",),
        rotated=0.5,
        complete=lambda _fields, decoder: replace(decoder, norm_weight_offset=1.0),
    ),
)
