"""Layers of Llama Nemotron, each with its sizes."""

from typing import Any

import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.network.stage_decoder import stage_ranges
from headrace.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from headrace.runtime.ranks.split import Split
from tests.support.mlx_lm_models import config_of


def with_block(**attention: Any) -> dict[str, Any]:
    config = config_of("nemotron-nas")
    first, *others = config["block_configs"]
    return normalized({**config, "block_configs": [{**first, "attention": attention}, *others]})


def test_sizes_are_those_of_each_layer() -> None:
    decoder = decoder_config(with_block(n_heads_in_group=2))
    assert decoder is not None
    assert [(layer.attends, layer.kv_heads, layer.inner) for layer in decoder.layers] == [
        (True, 2, 256), (False, 0, 512), (True, 1, 0), (True, 4, 256),
    ]  # fmt: skip
    assert decoder.appending == 4


def test_single_matrices_in_place_of_attention_run_in_mlx_lms_class() -> None:
    assert decoder_config(with_block(replace_with_linear=True)) is None


def test_windows_that_the_class_leaves_out_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="window_length"):
        decoder_config(with_block(n_heads_in_group=2, window_length=64))
    with pytest.raises(CheckpointError, match="groups of 3"):
        decoder_config(with_block(n_heads_in_group=3))


def test_no_rank_of_a_pipeline_is_without_attention() -> None:
    decoder = decoder_config(normalized(config_of("nemotron-nas-ends")))
    assert decoder is not None
    assert [len(layers) for layers in stage_ranges(decoder, Split("pipeline", (1, 1)))] == [2, 2]
    with pytest.raises(UsageError, match="without attention alone"):
        stage_ranges(decoder, Split("pipeline", (1, 3)))
