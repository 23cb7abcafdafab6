"""The table of matrices, for every family: the names that others tell a matrix by."""

import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.quantization import weighs_experts
from headrace.models.checkpoint.text_part import text_config
from headrace.models.network.tensors import layer_tensors
from tests.support import mlx_lm_models, tiny

CONFIGS = {
    **{name: tiny.config_of(name) for name in tiny.EVERY},
    **{name: mlx_lm_models.config_of(name) for name in mlx_lm_models.MODELS},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_modules_that_weigh_experts_are_known_by_their_names(name: str) -> None:
    config = decoder_config(text_config(normalized(CONFIGS[name])))
    assert config is not None
    for layer in config.stored:
        for tensor in layer_tensors(config, layer):
            assert weighs_experts(f"model.layers.0.{tensor.name}") == tensor.scores, tensor.name
