"""Layers of Command A+: windows, rotations and experts of each."""

from typing import Any

import pytest

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_CONFIG = {
    "model_type": "cohere2_moe", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "num_experts": 6,
    "num_experts_per_tok": 3, "first_k_dense_replace": 2, "prefix_dense_intermediate_size": 96,
}  # fmt: skip


def read(**changes: Any) -> DecoderConfig:
    decoder = decoder_config(normalized({**_CONFIG, **changes}))
    assert decoder is not None
    return decoder


def test_dense_layers_rotate_without_windows() -> None:
    layers = read().layers
    assert [layer.experts is None for layer in layers] == [True, True, *[False] * 5]
    assert [layer.window for layer in layers] == [None, None, 16, 16, 16, None, 16]
    assert [layer.rope is not None for layer in layers] == [True, True, True, True, True, False, True]


def test_dense_layers_with_windows_rotate_as_all_others() -> None:
    layers = read(prefix_dense_sliding_window_pattern=2).layers
    assert [layer.window for layer in layers[:3]] == [16, None, 16]
    assert [layer.rope is not None for layer in layers[:3]] == [True, False, True]


def test_a_shared_expert_is_added_or_averaged_with_the_others() -> None:
    for changes, expected in (
        ({}, (1.0, 0, 1.0)),
        ({"num_shared_experts": 2}, (0.5, 96, 0.5)),
        ({"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"}, (1.0, 48, 1.0)),
    ):
        experts = read(**changes).layers[-1].experts
        assert experts is not None
        assert (experts.scale, experts.shared, experts.shared_scale) == expected


def test_cohere_mixtures_without_windows_run_in_mlx_lms_class() -> None:
    assert decoder_config(normalized({**_CONFIG, "layer_types": ["full_attention"] * 7})) is None
    assert decoder_config(normalized({**_CONFIG, "num_experts_per_tok": 1})) is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expert_selection_fn": "tanh"}, UnsupportedModelError, "expert_selection_fn 'tanh'"),
        ({"shared_expert_combination_strategy": "max"}, UnsupportedModelError, "combination_strategy 'max'"),
        ({"mlp_layer_types": ["sparse"]}, CheckpointError, "mlp_layer_types"),
        ({"sliding_window_pattern": 0}, CheckpointError, "sliding_window_pattern"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(**changes)
