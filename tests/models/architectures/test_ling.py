"""Values of Ling 3's layers."""

import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.runtime.errors import CheckpointError
from tests.support.mlx_lm_models import config_of


def test_the_class_of_the_config_tells_ling_3_from_other_hybrids() -> None:
    config = {**config_of("ling-3"), "model_type": "bailing_hybrid"}
    assert decoder_config(normalized(config)) is None
    decoder = decoder_config(normalized({**config, "architectures": ["BailingMoeV3ForCausalLM"]}))
    assert decoder is not None
    assert [layer.attends for layer in decoder.layers] == [False, True, False, True, True]


@pytest.mark.parametrize("bound", [0.0, 5.0, True, "low"])
def test_bounds_of_decays_are_negative(bound: object) -> None:
    with pytest.raises(CheckpointError, match="kda_lower_bound"):
        decoder_config(normalized({**config_of("ling-3"), "kda_lower_bound": bound}))


def test_a_stated_bound_of_decays_is_used() -> None:
    decoder = decoder_config(normalized({**config_of("ling-3"), "kda_lower_bound": -3}))
    assert decoder is not None
    mixers = [layer.mixer for layer in decoder.layers if layer.mixer is not None]
    assert [mixer.decay_bound for mixer in mixers] == [3.0, 3.0]
