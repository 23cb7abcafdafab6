"""Shapes of architectures that mlx-lm's classes run: rows sum to the loaded model's cost."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_checkpoint, shape_of_mlx_lm_config
from headrace.models.cost.step_shape import total
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.registry.find_shape import find_shape
from headrace.runtime.errors import UnsupportedModelError
from tests.models.mlx_lm.test_costs import DEEPSEEK, GPT2, TALKIE
from tests.models.mlx_lm.test_network import CONFIGS, write

pytestmark = pytest.mark.peer
EVERY = {**CONFIGS, "gpt2": GPT2, "talkie": TALKIE, "deepseek_v41": DEEPSEEK}


@pytest.mark.sampled
@pytest.mark.parametrize("name", EVERY)
def test_rows_sum_to_the_loaded_models_cost(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, EVERY[name]))
    shape = shape_of_mlx_lm_checkpoint(checkpoint)
    network = MlxLmNetwork(checkpoint, device=mx.DeviceType.gpu)
    for past in (0, 5, 100):
        assert total(shape.step(past)) == (shape.cost.step_bytes(past), shape.cost.step_flops(past))
        assert shape.cost.step_bytes(past) == network.cost.step_bytes(past)
    assert shape.cost.weight_flops == pytest.approx(network.cost.weight_flops, rel=0.01)
    assert shape.resident_bytes == sum(array.nbytes for array in network.arrays)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["olmo2", "mixtral", "cohere2", "talkie", "deepseek_v41"])
def test_a_config_alone_gives_the_same(name: str, tmp_path: Path) -> None:
    exact = shape_of_mlx_lm_checkpoint(open_checkpoint(write(tmp_path, EVERY[name])))
    guessed = shape_of_mlx_lm_config({**EVERY[name], "dtype": "float32"})
    assert guessed.cost.weight_flops == exact.cost.weight_flops
    assert guessed.resident_bytes == pytest.approx(exact.resident_bytes, rel=0.01)
    section = {"group_size": 32, "bits": 4, "model.layers.0.mlp": False}
    quantized = shape_of_mlx_lm_config({**EVERY[name], "quantization": section})
    assert quantized.resident_bytes < 0.6 * exact.resident_bytes
    assert quantized.cost.weight_flops == exact.cost.weight_flops


def test_find_shape_finds_it_by_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TALKIE))
    name, shape = find_shape(str(tmp_path))
    assert (name, shape.layers, shape.source) == (tmp_path.name, 2, "config.json, mlx-lm's class of talkie")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    with pytest.raises(UnsupportedModelError, match="neither headrace nor mlx-lm") as caught:
        find_shape(str(tmp_path))
    assert caught.value.hint
