"""Bytes and FLOPs of a step, against the tensors it reads and sums by hand."""

from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import checkpoint_cost
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.metrics.cost import LayerKV, StepCost
from headrace.runtime.ops import native, reference
from tests.support import mlx_lm_models
from tests.support.kernels import KERNELS
from tests.support.tiny import (
    EVERY,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    config_of,
    load_decoder,
    quantize_model,
    write_model,
)


def stored_bytes(directory: Path) -> dict[str, int]:
    arrays = mx.load(str(directory / "model.safetensors"))
    assert isinstance(arrays, dict)
    return {name: array.nbytes for name, array in arrays.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("variant", EVERY)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "4-bit"])
def test_weight_bytes_are_the_bytes_of_the_tensors_read(tmp_path: Path, variant: str, quantized: bool) -> None:
    directory = write_model(tmp_path / "plain", variant, dtype=mx.float16)
    if quantized:
        directory = quantize_model(directory, tmp_path / "quantized")
    tied = config_of(variant)["tie_word_embeddings"]
    sizes = stored_bytes(directory)
    config = config_of(variant)
    active = config.get("num_experts_per_tok", 1)
    experts = config.get("num_experts", config.get("num_local_experts", 1))
    read = sum(
        size * active // experts if "switch_mlp" in name or "experts" in name else size
        for name, size in sizes.items()
        if tied or "embed_tokens" not in name
    )
    assert tied or read < sum(sizes.values())
    from_headers = checkpoint_cost(open_checkpoint(directory))
    loaded = load_decoder(directory, reference, mx.float16).cost
    assert from_headers == loaded
    assert loaded.weight_bytes == read


def test_a_table_that_is_also_the_output_projection_counts_once(tmp_path: Path) -> None:
    untied = load_decoder(write_model(tmp_path / "untied", "llama")).cost
    tied = load_decoder(write_model(tmp_path / "tied", "llama-linear")).cost
    assert untied.weight_bytes == tied.weight_bytes  # the same shapes otherwise
    assert untied.weight_flops == tied.weight_flops


def test_an_unused_output_projection_does_not_count(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama", dtype=mx.float16)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    cost = checkpoint_cost(open_checkpoint(directory))
    assert cost == load_decoder(directory, reference, mx.float16).cost


def test_flops_by_hand(tmp_path: Path) -> None:
    cost = load_decoder(write_model(tmp_path, "llama")).cost
    attention = HIDDEN * HEADS * HEAD_DIM * 2 + HIDDEN * KV_HEADS * HEAD_DIM * 2
    assert cost.weight_flops == 2 * (LAYERS * (attention + 3 * HIDDEN * INNER) + VOCAB * HIDDEN)
    per_entry = 2 * 2 * HEADS * HEAD_DIM  # a multiply-add per element of q·k and of weights·v
    assert cost.step_flops(9) == cost.weight_flops + 10 * LAYERS * per_entry


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 200))
def test_flops_of_rows_are_those_of_steps(past: int, rows: int, window: int) -> None:
    cost = StepCost(9, 1000, [LayerKV(3, 1), LayerKV(2, 1, window)], attention_flops_per_entry=7)
    assert cost.step_flops(past, rows) == sum(cost.step_flops(past + row) for row in range(rows))


def test_a_step_reads_its_own_row_too(tmp_path: Path) -> None:
    cost = load_decoder(write_model(tmp_path, "llama")).cost
    row = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert cost.kv_bytes_per_token == cost.kv_bytes_written() == row
    for past in (0, 1, 100):
        assert cost.kv_bytes_read(past) == (past + 1) * row
        assert cost.step_bytes(past) == cost.weight_bytes + (past + 2) * row
    assert cost.kv_bytes(7) == 7 * row


def test_windows_bound_the_bytes_read(tmp_path: Path) -> None:
    cost = load_decoder(write_model(tmp_path, "gemma3")).cost  # window 16 in two of four layers
    row = 2 * KV_HEADS * HEAD_DIM * 4
    assert sorted((layer.count, layer.window or 0) for layer in cost.kv) == [(2, 0), (2, 16)]
    assert cost.kv_bytes_read(15) == 4 * 16 * row
    assert cost.kv_bytes_read(16) == 2 * 17 * row + 2 * 16 * row
    assert cost.kv_bytes_per_token == 4 * row  # all of it is kept


def test_a_window_of_one_reads_one_entry() -> None:
    cost = StepCost(weight_bytes=0, weight_flops=0, kv=[LayerKV(1, 8, window=1)])
    assert [cost.kv_bytes_read(past) for past in (0, 1, 50)] == [8, 8, 8]


@pytest.mark.peer
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3"])
def test_mlx_lms_classes_are_accounted_alike(tmp_path: Path, variant: str) -> None:
    directory = quantize_model(write_model(tmp_path / "plain", variant), tmp_path / "quantized")
    mine = load_decoder(directory).cost
    theirs = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu).cost
    assert theirs.weight_bytes == mine.weight_bytes
    assert theirs.weight_flops == mine.weight_flops
    for past in (0, 10, 100):
        assert theirs.step_bytes(past) == mine.step_bytes(past)
        assert theirs.step_flops(past) == mine.step_flops(past)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [
        "apertus",
        "llama4",
        "llama4-maverick",
        "llama4-dense",
        "deepseek-v2",
        "deepseek-v2-lite",
        "qwen3-vl-moe",
        "hunyuan-moe-lists",
        "youtu",
    ],
)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "4-bit"])
def test_costs_from_headers_equal_those_of_the_loaded_model(tmp_path: Path, name: str, quantized: bool) -> None:
    """Projections that are stored as one, experts beside a shared one, chunks, numbers of activations."""
    config = mlx_lm_models.config_of(name)
    directory = mlx_lm_models.write_mlx_lm_model(tmp_path / "plain", config, dtype=mx.float16)
    if quantized:
        directory = quantize_model(directory, tmp_path / "quantized")
    loaded = load_decoder(directory, reference, mx.float16).cost
    from_headers = checkpoint_cost(open_checkpoint(directory))
    assert from_headers == loaded
    assert from_headers is not None
    assert from_headers.weight_parts == loaded.weight_parts
    [chunks] = [layer for layer in loaded.kv if layer.chunked] or [None]
    assert chunks is None or name.startswith("llama4")
    if chunks is not None and chunks.window == mlx_lm_models.WINDOW:
        assert [chunks.visible(entries) for entries in (1, 15, 16, 17, 40)] == [1, 15, 16, 1, 8]


@pytest.mark.parametrize("name", ["afmoe", "klear", "olmoe"])
def test_experts_that_are_stored_one_by_one_count_as_stacks(tmp_path: Path, name: str) -> None:
    directory = mlx_lm_models.write_mlx_lm_model(tmp_path, mlx_lm_models.config_of(name))
    stacks = checkpoint_cost(open_checkpoint(directory))
    assert stacks is not None
    arrays = mx.load(str(directory / "model.safetensors"))
    assert isinstance(arrays, dict)
    single = {}
    for tensor, array in arrays.items():
        at, _, projection = tensor.rpartition(".mlp.")
        if array.ndim != 3 or not at:
            single[tensor] = array
            continue
        stored = projection.partition(".")[2]
        single |= {f"{at}.mlp.experts.{number}.{stored}": array[number] for number in range(array.shape[0])}
    mx.eval(single)  # the file is written anew
    mx.save_safetensors(str(directory / "model.safetensors"), single)
    assert len(single) > len(arrays)
    assert checkpoint_cost(open_checkpoint(directory)) == stacks
    loaded = load_decoder(directory).cost
    assert (loaded.weight_bytes, loaded.weight_flops) == (stacks.weight_bytes, stacks.weight_flops)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 90))
def test_flops_of_rows_in_chunks(past: int, rows: int, chunk: int) -> None:
    layer = LayerKV(1, 1, chunk, chunked=True)
    assert layer.visible_by_all(past + 1, rows) == sum(layer.visible(past + 1 + row) for row in range(rows))


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 9), st.integers(1, 9))
def test_flops_of_rows_that_see_chosen_blocks(past: int, rows: int, blocks: int, block: int) -> None:
    layer = LayerKV(1, 1, chosen=blocks * block, block=block)
    assert layer.visible_by_all(past + 1, rows) == sum(layer.visible(past + 1 + row) for row in range(rows))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5",
        "lfm2",
        "granite-hybrid",
        "falcon-h1",
        "nemotron-h",
        "nemotron-h-moe",
        "olmo-hybrid",
        "kimi-linear",
        "kimi-k3",
        "kimi-k3-single",
        "mamba2",
        "mamba",
        "rwkv7",
    ],
)
def test_recurrent_state_is_counted_from_headers(tmp_path: Path, name: str) -> None:
    directory = mlx_lm_models.write_mlx_lm_model(tmp_path, mlx_lm_models.config_of(name))
    network = load_decoder(directory, native)
    assert checkpoint_cost(open_checkpoint(directory)).state_bytes == network.kv_shape.state_bytes > 0


@pytest.mark.parametrize(
    "name", ["kimi-k3", "kimi-k3-single", "mamba2", "mamba2-biased", "mamba", "mamba-normed", "rwkv7", "rwkv7-tied"]
)
def test_weights_of_composed_layers_are_counted_from_headers(tmp_path: Path, name: str) -> None:
    directory = mlx_lm_models.write_mlx_lm_model(tmp_path, mlx_lm_models.config_of(name))
    loaded = load_decoder(directory, KERNELS[-1]).cost
    from_headers = checkpoint_cost(open_checkpoint(directory))
    assert from_headers is not None
    assert (from_headers.weight_bytes, from_headers.weight_flops) == (loaded.weight_bytes, loaded.weight_flops)
    assert from_headers.weight_parts == loaded.weight_parts
