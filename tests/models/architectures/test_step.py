"""Values of Step 3.5's layers."""

import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.runtime.errors import CheckpointError
from tests.support.mlx_lm_models import config_of


@pytest.mark.parametrize(
    "change", [{"moe_layers_enum": "1,two"}, {"swiglu_limits": [-1.0]}, {"swiglu_limits": ["a"]}, {"rope_theta": []}]
)
def test_lists_by_layer_of_a_wrong_length_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        decoder_config(normalized({**config_of("step3.5"), **change}))


def test_layers_of_one_kind_with_different_rotations_run_in_mlx_lms_class() -> None:
    assert decoder_config(normalized({**config_of("step3.5"), "rope_theta": [1e4, 1e4, 5e5, 1e4]})) is None
