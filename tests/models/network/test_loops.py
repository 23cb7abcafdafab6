"""Layers that run several times in a step (Nanbeige, IQuest Coder): weights once, K/V of every loop."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import checkpoint_cost
from headrace.models.cost.shape_sources import shape_of_config
from headrace.models.cost.step_shape import StepShape, total
from headrace.models.loading.rank_part import check_division
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.network.parameters import Parameters
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.ops import Ops, reference
from headrace.runtime.ranks.split import Split
from tests.support.adapters import logits_after
from tests.support.kernels import KERNELS, name_of
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder

VARIANTS = ("nanbeige", "nanbeige-unnormed", "iquest-loop", "iquest-loop-biased")
PROMPT = list(range(1, 30))


def shape_with(loops: int) -> StepShape:
    return shape_of_config({**config_of("nanbeige"), "num_loops": loops})


@pytest.mark.peer
@pytest.mark.parametrize("name", VARIANTS)
def test_costs_are_those_of_headers_and_of_mlx_lms_class(tmp_path: Path, name: str) -> None:
    half = write_mlx_lm_model(tmp_path / "half", config_of(name), dtype=mx.float16)
    assert checkpoint_cost(open_checkpoint(half)) == load_decoder(half, reference, mx.float16).cost
    directory = write_mlx_lm_model(tmp_path / "whole", config_of(name))
    network = load_decoder(directory)
    theirs = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu).cost
    assert network.cost.weight_bytes == theirs.weight_bytes
    if name.startswith("nanbeige"):  # the class counts vectors of gates as a matrix
        assert network.cost.weight_flops == theirs.weight_flops
    for past in (0, 10, 100):
        second = 0  # reading of the first loop's entries, which the caches of the class do not show
        if name.startswith("iquest"):
            second = network.cost.kv_bytes_per_token // 2 * (past + 1)
        assert network.cost.step_bytes(past) == theirs.step_bytes(past) + second


def test_a_step_reads_all_layers_and_their_entries_in_every_loop() -> None:
    once, twice = (shape_with(loops) for loops in (1, 2))
    layers = sum(matrix.step_bytes for matrix in once.matrices if not matrix.output)
    for batch in (1, 4):
        assert twice.weight_bytes(batch) == once.weight_bytes(batch) + layers
    assert twice.resident_bytes == once.resident_bytes
    assert twice.cost.kv_bytes(40) == 2 * once.cost.kv_bytes(40)


def test_a_prompt_leaves_out_the_end_of_the_last_loop_alone() -> None:
    once, twice = (shape_with(loops) for loops in (1, 2))
    layers = sum(matrix.step_bytes for matrix in once.matrices if not matrix.output)
    entries = once.cost.kv_bytes_per_token

    def read(shape: StepShape) -> int:
        return sum(row.count * row.nbytes for row in shape.prefill(1) if not row.name.startswith("K/V"))

    assert read(twice) == read(once) + layers
    assert twice.cost.late_bytes == once.cost.late_bytes
    assert twice.cost.late_flops == once.cost.late_flops
    assert total(twice.step(0))[0] == total(once.step(0))[0] + layers + 2 * entries


@pytest.mark.parametrize("name", ["nanbeige", "iquest-loop"])
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_a_reloaded_layer_is_used_in_every_loop(tmp_path: Path, ops: Ops, name: str) -> None:
    config = config_of(name)
    first, other = (write_mlx_lm_model(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    weights, others = (mx.load(str(directory / "model.safetensors")) for directory in (first, other))
    assert isinstance(weights, dict)
    assert isinstance(others, dict)
    parts = (".layers.1.", ".gate_projections.1.")
    mixed = {name: others[name] if any(part in name for part in parts) else weights[name] for name in weights}
    expected = write_mlx_lm_model(tmp_path / "mixed", config)
    mx.save_safetensors(str(expected / "model.safetensors"), mixed)
    parameters = Parameters(open_checkpoint(expected), ops, mx.float32)
    changed = load_decoder(first, ops).with_part(parameters, 1)
    assert mx.array_equal(logits_after(changed, PROMPT), logits_after(load_decoder(expected, ops), PROMPT))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_double_loop_split", True),
        ("loop_share_kv", True),
        ("enable_depth_attention", True),
        ("num_loops", 65),
    ],
)
def test_loops_of_another_kind_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match="65 loops" if key == "num_loops" else key):
        decoder_config(normalized({**config_of("nanbeige"), key: value}))


def test_a_pipeline_has_layers_of_one_loop_alone(tmp_path: Path) -> None:
    for loops in (1, 2):
        directory = write_mlx_lm_model(tmp_path / str(loops), {**config_of("nanbeige"), "num_loops": loops})
        checkpoint = open_checkpoint(directory)
        config = decoder_config(checkpoint.config)
        check_division(checkpoint, config, Split("tensor", (1, 1)))
        pipeline = Split("pipeline", (1, 1))
        if loops == 1:
            check_division(checkpoint, config, pipeline)
            continue
        with pytest.raises(UsageError, match="nanbeige"):
            check_division(checkpoint, config, pipeline)


def test_gates_weigh_the_attention_of_both_loops(tmp_path: Path) -> None:
    """With gates that are closed or open, the output depends on one loop's window alone, or on all entries."""
    config = {**config_of("iquest-loop"), "num_hidden_layers": 1}
    directory = write_mlx_lm_model(tmp_path, config)
    arrays = mx.load(str(directory / "model.safetensors"))
    assert isinstance(arrays, dict)
    mx.eval(arrays)  # the file is written anew
    logits = {}
    for bias in (-1e4, 1e4):
        arrays["model.gate_projections.0.bias"] = mx.full((4,), bias)
        mx.save_safetensors(str(directory / "model.safetensors"), arrays)
        for window in (5, 7):
            (directory / "config.json").write_text(json.dumps({**config, "loop_window_size": window}))
            logits[bias, window] = logits_after(load_decoder(directory), PROMPT)
    assert mx.array_equal(logits[1e4, 5], logits[1e4, 7])
    assert not mx.allclose(logits[-1e4, 5], logits[-1e4, 7], atol=1e-3)


def test_more_loops_with_gates_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="loop_num"):
        decoder_config(normalized({**config_of("iquest-loop"), "loop_num": 3}))
