"""Layers of Muse Glimmer, in its own config and in that of a multimodal one."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.runtime.errors import CheckpointError
from headrace.runtime.ops import reference
from tests.support.alone import new_cache
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder


def logits_of(directory: Path) -> mx.array:
    network = load_decoder(directory, reference)
    cache = new_cache(network, 16)
    cache.reserve(5)
    return network.all_logits(network.layers(network.embed(mx.array([[1, 2, 3, 4, 5]])), cache))


def test_the_text_part_of_a_multimodal_checkpoint_is_the_same(tmp_path: Path) -> None:
    flat = write_mlx_lm_model(tmp_path / "flat", config_of("muse-glimmer"))
    nested = tmp_path / "nested"
    nested.mkdir()
    arrays = mx.load(str(flat / "model.safetensors"))
    assert isinstance(arrays, dict)
    tensors = {name.replace("model.", "model.language_model."): array for name, array in arrays.items()}
    mx.save_safetensors(str(nested / "model.safetensors"), {**tensors, "vision_tower.patch.weight": mx.zeros((3, 32))})
    text = {**config_of("muse-glimmer"), "model_type": "muse_glimmer_text"}
    del text["sliding_window"]  # a default of transformers, longer than the prompt
    (nested / "config.json").write_text(json.dumps({"model_type": "muse_glimmer", "text_config": text}))
    assert mx.array_equal(logits_of(flat), logits_of(nested)).item()


def test_layers_that_rotate_are_listed_or_follow_from_both_of_its_classes() -> None:
    config = config_of("muse-glimmer")
    decoder = decoder_config(normalized(config))
    assert decoder is not None
    assert [layer.rope is not None for layer in decoder.layers] == [True, True, True, False]
    assert decoder_config(normalized({**config, "num_hidden_layers": 5})) is None
    listed = decoder_config(normalized({**config, "num_hidden_layers": 5, "layer_rope_theta": [0, 1e4, 0, 1e4, 1e4]}))
    assert listed is not None
    assert [layer.rope is not None for layer in listed.layers] == [False, True, False, True, True]
    with pytest.raises(CheckpointError, match="layer_rope_theta"):
        decoder_config(normalized({**config, "layer_rope_theta": [0, 1e4]}))
