"""Bytes and FLOPs of a step, against the tensors a real step reads, the totals, and arithmetic by hand."""

import contextlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import has_shape, shape_of_checkpoint, shape_of_config
from headrace.models.cost.step_shape import StepShape, total
from headrace.models.network.decoder import Decoder
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.metrics.cost import LayerKV, Matrix
from headrace.runtime.ops import Mixture, reference
from headrace.runtime.ops.kv_format import Q8
from tests.support import mlx_lm_models
from tests.support.alone import new_cache, prefill
from tests.support.mlx_lm_models import MODELS, write_mlx_lm_model
from tests.support.tiny import VARIANTS, config_of, load_decoder, quantize_model, write_model


class Watching:
    """Operations that note every array a step reads; K/V counts as far as a query can see."""

    def __init__(self) -> None:
        self.arrays: dict[int, mx.array] = {}
        self.kv_bytes = 0
        self.of_experts = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(reference, name)
        if name in ("prepare", "kv_format", "embed"):  # a table that is looked up is not read
            return function

        def watched(*arguments: Any, **options: Any) -> Any:
            for argument in arguments[1:]:  # the first is an activation
                for array in getattr(argument, "arrays", [argument]):
                    if isinstance(array, mx.array) and array.ndim < 3:
                        self.arrays[id(array)] = array
            return function(*arguments, **options)

        return watched

    def experts(self, x: mx.array, norm: mx.array, eps: float, m: Mixture, *others: Any) -> mx.array:
        for array in (norm, *m.router.arrays):
            self.arrays[id(array)] = array
        for stack in m.stacks:
            self.of_experts += stack.nbytes // m.routing.count * m.routing.active
        return reference.experts(x, norm, eps, m, *others)

    def attend(self, qkv: Any, keys: mx.array, values: mx.array, offset: int, spec: Any, first: int, phase: Any) -> Any:
        for norm in (spec.q_norm, spec.k_norm):
            if norm is not None:
                self.arrays[id(norm)] = norm
        seen = min(offset + 1, spec.window or offset + 1)
        entry = keys.nbytes // keys.shape[2] + values.nbytes // values.shape[2]
        self.kv_bytes += (seen + 1) * entry  # read, and the new row written
        return reference.attend(qkv, keys, values, offset, spec, first, phase)


def touched(decoder: Decoder, past: int) -> int:
    """Bytes of all that one step with `past` entries reads and appends."""
    watching = Watching()
    watched = decoder.with_ops(watching)  # type: ignore[arg-type]
    cache = new_cache(watched, past + 8)
    for _ in prefill(watched, cache, [1] * past):
        pass
    watching.arrays.clear()
    watching.kv_bytes = watching.of_experts = 0
    cache.reserve(1)
    mx.eval(watched.logits(watched.layers(watched.embed(mx.array([[1]])), cache)))
    return sum(array.nbytes for array in watching.arrays.values()) + watching.of_experts + watching.kv_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_of_a_step_are_those_of_the_tensors_touched(variant: str, quantized: bool, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "plain", variant)
    if quantized:
        directory = quantize_model(directory, tmp_path / "quantized")
    decoder = load_decoder(directory)
    for past in (3, 40):
        assert decoder.cost.step_bytes(past) == pytest.approx(touched(decoder, past), rel=0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantized", [False, True])
def test_rows_sum_exactly_to_the_totals(variant: str, quantized: bool, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "plain", variant, dtype=mx.float16)
    if quantized:
        directory = quantize_model(directory, tmp_path / "quantized")
    checkpoint = open_checkpoint(directory)
    shape = shape_of_checkpoint(checkpoint)
    cost = shape.cost
    assert cost == load_decoder(directory, reference, mx.float16).cost
    assert shape.resident_bytes == checkpoint.nbytes
    for past in (0, 1, 15, 16, 100):
        assert total(shape.step(past)) == (cost.step_bytes(past), cost.step_flops(past))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_alone_gives_the_same_sizes(variant: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "plain", variant, dtype=mx.float16)
    exact = shape_of_checkpoint(open_checkpoint(directory))
    guessed = shape_of_config({**config_of(variant), "torch_dtype": "float16"})
    assert guessed.cost.weight_bytes == exact.cost.weight_bytes
    assert guessed.resident_bytes == exact.resident_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_a_config_alone_gives_the_bytes_of_every_family(name: str, tmp_path: Path) -> None:
    config = mlx_lm_models.config_of(name)
    directory = write_mlx_lm_model(tmp_path / "model", config, dtype=mx.bfloat16)
    guessed = shape_of_config({**config, "torch_dtype": "bfloat16"})
    exact = shape_of_checkpoint(open_checkpoint(directory))
    assert guessed.matrices == exact.matrices
    assert guessed.vector_bytes == exact.vector_bytes


@pytest.mark.parametrize("quantized", [False, True])
def test_a_config_in_float32_gives_the_bytes_of_its_vectors_and_biases(quantized: bool, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "plain", "qwen2", dtype=mx.float32)
    if quantized:
        directory = quantize_model(directory, tmp_path / "quantized")
    checkpoint = open_checkpoint(directory)
    guessed = shape_of_config({**checkpoint.config, "torch_dtype": "float32"})
    exact = shape_of_checkpoint(checkpoint)
    assert guessed.matrices == exact.matrices
    assert guessed.vector_bytes == exact.vector_bytes


def test_a_conversion_that_states_a_bias_of_attention_has_no_more() -> None:
    """Configs of converted Qwen 2 files say attention_bias; its output projection has none."""
    config = config_of("qwen2")
    assert shape_of_config({**config, "attention_bias": True}).matrices == shape_of_config(config).matrices


def test_bytes_and_flops_of_a_projection_equal_those_by_hand() -> None:
    """4096 x 4096 in half precision: each of its bytes is used for one FLOP."""
    shape = one_matrix(Matrix("proj", 1, 4096, 4096, 4096 * 4096 * 2))
    row = shape.step(0)[0]
    assert (row.nbytes, row.flops, row.intensity) == (33_554_432, 33_554_432, 1.0)
    assert shape.prefill(512)[0].intensity == 512


def test_a_cache_of_n_entries_is_read_as_n_plus_one_rows() -> None:
    shape = one_matrix(Matrix("proj", 1, 64, 64, 8192))
    read, append = shape.step(100)[2:]
    assert read.nbytes == 101 * 2 * 8 * 128 * 2
    assert read.shape == "101 x 16 x 128"
    assert append.nbytes == 2 * 8 * 128 * 2
    assert read.flops == 4 * 32 * 128 * 101


def test_a_window_bounds_the_bytes_read() -> None:
    shape = replace(one_matrix(Matrix("proj", 1, 64, 64, 8192)), kv=[LayerKV(1, 4096, 16)])
    assert shape.step(100)[2].nbytes == 16 * 4096
    assert shape.prefill(4, past=100)[2].flops == 4 * 16 * 4 * 32 * 128


def test_prefill_attention_grows_and_makes_no_logits() -> None:
    shape = one_matrix(Matrix("proj", 1, 64, 64, 8192), Matrix("head", 1, 1000, 64, 1000, output=True))
    rows = shape.prefill(10)
    assert "head" not in [row.name for row in rows]
    assert next(row for row in rows if row.name == "K/V read").flops == 4 * 32 * 128 * sum(range(1, 11))


def test_of_a_mixture_only_the_active_experts_are_read() -> None:
    config = {
        **config_of("qwen3"), "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }  # fmt: skip
    shape = shape_of_config(config)
    rows = {row.name: row for row in shape.step(0)}
    assert rows["expert up_proj"].count == 3 * 2  # layers x active
    assert rows["router"].shape == "16 x 64"
    experts = [matrix for matrix in shape.matrices if matrix.name.startswith("expert")]
    assert sum(matrix.step_bytes for matrix in experts) * 8 == sum(matrix.count * matrix.nbytes for matrix in experts)
    assert total(shape.step(9)) == (shape.cost.step_bytes(9), shape.cost.step_flops(9))


def test_bytes_follow_another_quantization_of_weights_and_kv() -> None:
    shape = one_matrix(Matrix("proj", 2, 64, 128, 64 * 128 * 2))
    quantized = shape.stored_at(4)
    assert quantized.matrices[0].nbytes == 64 * 128 // 2 + 64 * 128 // 64 * 4
    assert shape.resident_bytes - quantized.resident_bytes == 2 * (64 * 128 * 2 - quantized.matrices[0].nbytes)
    assert shape.with_kv(Q8).cost.kv_bytes_per_token * 32 == shape.cost.kv_bytes_per_token * 17


def test_unknown_and_contradictory_configs_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="jamba"):
        shape_of_config({"model_type": "jamba"})
    with pytest.raises(CheckpointError):
        shape_of_config({**config_of("qwen3"), "model_type": "qwen3_moe"})
    with pytest.raises(CheckpointError):
        shape_of_config({**config_of("llama"), "quantization": {"bits": 0.5, "group_size": 64}})


def one_matrix(*matrices: Matrix) -> StepShape:
    return StepShape(
        source="by hand", layers=1, heads=32, kv_heads=8, head_dim=128, context_length=4096, matrices=matrices,
        vector_bytes=0, kv=[LayerKV(1, 2 * 8 * 128 * 2)], resident_bytes=10**6,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, 3, None])
def test_a_model_type_must_be_a_text(kind: Any) -> None:
    with contextlib.suppress(CheckpointError):
        assert not has_shape({**config_of("llama"), "model_type": kind})
