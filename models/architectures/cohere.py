"""Command R, R7B and A, and Command A+ with experts: attention and feed-forward have one LayerNorm.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guards: tests/parity/test_mlx_lm_families.py by logits, and tests/models/architectures/test_cohere.py.
"""

from typing import Literal

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import DecoderConfig, ExpertLayers, ExpertsConfig, Family
from headrace.models.architectures.experts import count_experts
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layer_norms import SHARED_NORM
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_COHERE = Family(SHARED_NORM, interleaved=True, norm="layer", parallel=True)


def _complete(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the norms that the config turns on, and the factor of logits. 0.0625: default of the family's class."""
    values = fields.values
    qk_norm: Literal["layer"] | None = "layer" if values.get("use_qk_norm") else None
    family = replace(decoder.family, norm_bias=bool(values.get("layer_norm_bias")), qk_norm=qk_norm)
    return replace(decoder, family=family, logit_scale=fields.positive("logit_scale", default=0.0625))


# Command A+
def _mixture_keys(config: Config) -> None:
    """State the kinds of all layers. Windows of the first dense layers follow a period of their own."""
    count = config.get("num_hidden_layers")
    dense = config.get("first_k_dense_replace") or 0
    if type(count) is not int or type(dense) is not int:
        return
    if config.get("mlp_layer_types") is None:
        config["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(count)]
    if config.get("layer_types") is None:
        dense_period = config.get("prefix_dense_sliding_window_pattern", 1)
        period = config.get("sliding_window_pattern", 4)
        if type(dense_period) is not int or type(period) is not int or dense_period < 1 or period < 1:
            raise CheckpointError("config.json: sliding_window_pattern must be a positive integer")
        numbers = [(layer + 1) % dense_period for layer in range(dense)]
        numbers += [(layer + 1) % period for layer in range(count - dense)]
        config["layer_types"] = ["sliding_attention" if number else "full_attention" for number in numbers]


def _experts(fields: Fields, layers: int) -> ExpertLayers:
    """Return the experts of each layer. Raises UnsupportedModelError for other ways to choose or to add them."""
    values = fields.values
    selection = values.get("expert_selection_fn") or "softmax"
    combination = values.get("shared_expert_combination_strategy") or "average"
    if selection not in ("softmax", "sigmoid"):
        raise UnsupportedModelError(f"config.json: a cohere2_moe with expert_selection_fn {selection!r:.40}")
    if combination not in ("average", "sum"):
        raise UnsupportedModelError(
            f"config.json: a cohere2_moe with shared_expert_combination_strategy {combination!r:.40}"
        )
    size = fields.count("intermediate_size")
    shared = size * fields.count_or_zero("num_shared_experts", default=0)
    share = 0.5 if shared and combination == "average" else 1.0  # of routed experts, and of the shared one
    experts = ExpertsConfig(
        *count_experts(fields, "num_experts"),
        size=size,
        normalized=selection == "softmax" or bool(values.get("norm_topk_prob", True)),
        sigmoid=selection == "sigmoid",
        scale=share,
        shared=shared,
        shared_scale=share,
    )
    return [None if kind == "dense" else experts for kind in fields.required_list("mlp_layer_types", layers)]


def _mixture_runs(fields: Fields) -> bool:
    """Return False without windows, where no layer would rotate, and for one expert a token: its weight is 1."""
    values = fields.values
    slides = bool(values.get("sliding_window")) and "sliding_attention" in (values.get("layer_types") or [])
    return slides and values.get("num_experts_per_tok") != 1


def _complete_mixture(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the rotation of dense layers, which all turn if they have no windows of their own, and another norm."""
    decoder = _complete(fields, decoder)
    rope = next(layer.rope for layer in decoder.layers if layer.rope is not None)
    layers = decoder.layers
    if fields.count("prefix_dense_sliding_window_pattern", default=1) == 1:
        layers = tuple(replace(layer, rope=rope) if layer.experts is None else layer for layer in layers)
    if fields.values.get("rms_norm_eps") is None:
        return replace(decoder, layers=layers)
    family = replace(decoder.family, norm="rms")
    return replace(decoder, layers=layers, family=family, norm_eps=fields.positive("rms_norm_eps"))


ROWS = (
    Architecture(
        "cohere",
        _COHERE,
        context=8192,
        tied=True,
        eps="layer_norm_eps",
        only={"tie_word_embeddings": True},
        theta=8e6,
        complete=_complete,
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
        complete=_complete,
    ),
    Architecture(
        "cohere2_moe",
        _COHERE,
        defaults={
            "sliding_window": 4096, "layer_norm_eps": 1e-5, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
        },
        add_keys=_mixture_keys,
        context=8192,
        tensor_names=(
            (".experts.gate_up_proj", ".switch_mlp.input_linear.weight"),
            (".experts.down_proj", ".switch_mlp.down_proj.weight"),
        ),
        tied=True,
        eps="layer_norm_eps",
        position_free="full",
        inner_size=lambda fields: fields.count(
            "prefix_dense_intermediate_size", default=fields.count("intermediate_size")
        ),
        experts=_experts,
        runs=_mixture_runs,
        complete=_complete_mixture,
    ),
)  # fmt: skip
