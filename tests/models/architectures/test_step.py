"""Step 3.5 as its makers publish it: other names, and norms stored minus one."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.runtime.errors import CheckpointError
from headrace.runtime.ops import reference
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder

_PUBLISHED = (
    (".mlp.gate.gate.", ".moe.gate."), (".mlp.gate.router_bias", ".moe.router_bias"), (".mlp.switch_mlp.", ".moe."),
    (".mlp.share_expert.", ".share_expert."),
)  # fmt: skip


def published(name: str, array: mx.array) -> tuple[str, mx.array]:
    for theirs, original in _PUBLISHED:
        name = name.replace(theirs, original)
    return name, array - 1 if "norm" in name else array


def test_published_tensors_equal_converted_ones(tmp_path: Path) -> None:
    converted = write_mlx_lm_model(tmp_path / "converted", config_of("step3.5"))
    arrays = mx.load(str(converted / "model.safetensors"))
    assert isinstance(arrays, dict)
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_bytes((converted / "config.json").read_bytes())
    tensors = dict(published(name, array) for name, array in arrays.items())
    mx.save_safetensors(str(original / "model.safetensors"), tensors)
    decoders = [load_decoder(directory, reference) for directory in (converted, original)]
    vectors = [[array for layer in decoder._layers for array in layer.vectors] for decoder in decoders]
    assert all(mx.allclose(ours, theirs, atol=1e-6).item() for ours, theirs in zip(*vectors, strict=True))


@pytest.mark.parametrize(
    "change", [{"moe_layers_enum": "1,two"}, {"swiglu_limits": [-1.0]}, {"swiglu_limits": ["a"]}, {"rope_theta": []}]
)
def test_values_of_no_layers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        decoder_config(normalized({**config_of("step3.5"), **change}))


def test_layers_of_a_kind_that_turn_differently_are_left_to_the_class() -> None:
    assert decoder_config(normalized({**config_of("step3.5"), "rope_theta": [1e4, 1e4, 5e5, 1e4]})) is None
