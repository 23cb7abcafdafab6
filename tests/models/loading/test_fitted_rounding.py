"""Fitted rounding is stored as MLX stores its own, with a smaller error."""

import mlx.core as mx
import pytest

from headrace.models.checkpoint.quantization import BITS, Groups
from headrace.models.loading.fitted_rounding import dequantized, rounded, squared_error, stored_bytes, through_rounding
from headrace.models.loading.mixed_quantization import FORMATS


def error(matrix: mx.array, stood_for: mx.array) -> float:
    return float(((matrix.astype(mx.float32) - stood_for.astype(mx.float32)) ** 2).sum().item())


@pytest.fixture
def matrix() -> mx.array:
    return mx.random.normal((24, 256), key=mx.random.key(1)).astype(mx.float16)


@pytest.mark.parametrize("groups", FORMATS, ids=str)
def test_fitted_rounding_stores_the_bytes_that_were_predicted(matrix: mx.array, groups: Groups) -> None:
    weight = rounded(matrix, groups)
    assert sum(array.nbytes for array in weight.arrays) == stored_bytes(matrix.size, groups)


@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_smaller_than_that_of_mlx(matrix: mx.array, bits: int) -> None:
    mlx = mx.dequantize(*mx.quantize(matrix, 64, bits), 64, bits)
    assert error(matrix, dequantized(rounded(matrix, Groups(bits, 64)), mx.float32)) < error(matrix, mlx)


@pytest.mark.parametrize("bits", BITS)
def test_weights_on_the_quantization_grid_are_rounded_exactly(bits: int) -> None:
    codes = mx.random.randint(0, 2**bits, (8, 64), key=mx.random.key(2))
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1  # the grid's ends
    matrix = (codes * 0.25 - 3).astype(mx.float32)
    assert mx.array_equal(dequantized(rounded(matrix, Groups(bits, 64)), mx.float32), matrix)


def test_rounding_in_pieces_gives_the_same_weights_in_little_memory() -> None:
    matrix = mx.random.normal((1 << 14, 256), key=mx.random.key(5)).astype(mx.float16)  # 8 MiB
    importance = mx.random.uniform(shape=(256,), key=mx.random.key(6))
    groups = Groups(3, 64)
    mx.eval(matrix, importance)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    values = through_rounding(matrix, groups, importance)
    assert mx.get_peak_memory() - before < 3.5 * matrix.nbytes  # MLX's arrays for the whole matrix take 10 times
    assert mx.array_equal(values, dequantized(rounded(matrix, groups, importance), matrix.dtype))


def test_equal_weights_and_zeros_are_exact() -> None:
    matrix = mx.concatenate([mx.zeros((1, 64)), mx.full((1, 64), 0.5), mx.full((1, 64), -2.0)]).astype(mx.bfloat16)
    weight = rounded(matrix, Groups(2, 32))
    assert mx.array_equal(dequantized(weight, mx.bfloat16), matrix)
    assert weight.scales is not None
    assert weight.scales.dtype == mx.bfloat16


def test_scales_of_float32_weights_take_two_bytes() -> None:
    weight = rounded(mx.random.normal((4, 64)), Groups(4, 64))
    assert weight.scales is not None
    assert weight.scales.dtype == mx.float16


def test_the_error_of_a_large_matrix_is_estimated_from_its_rows() -> None:
    matrix = mx.random.normal((4096, 64), key=mx.random.key(3))
    whole = error(matrix, dequantized(rounded(matrix, Groups(3, 64)), mx.float32))
    assert squared_error(matrix, Groups(3, 64)) == pytest.approx(whole, rel=0.05)


def test_important_columns_are_rounded_more_carefully(matrix: mx.array) -> None:
    importance = mx.where(mx.arange(256) % 32 == 0, 100.0, 1.0)
    even = dequantized(rounded(matrix, Groups(3, 64)), mx.float32)
    careful = dequantized(rounded(matrix, Groups(3, 64), importance), mx.float32)
    assert error(matrix[:, ::32], careful[:, ::32]) < error(matrix[:, ::32], even[:, ::32]) / 2


def test_columns_without_activations_are_rounded_too(matrix: mx.array) -> None:
    importance = mx.where(mx.arange(256) < 128, 1.0, 0.0)
    values = dequantized(rounded(matrix, Groups(4, 64), importance), mx.float32)
    assert mx.isfinite(values).all().item()
    assert error(matrix[:, 128:], values[:, 128:]) < 0.02 * float((matrix.astype(mx.float32) ** 2).sum().item())


@pytest.mark.parametrize("groups", [Groups(3, 64), Groups(4, 32, "mxfp4")], ids=str)
def test_each_matrix_of_a_stack_is_rounded_by_its_own_columns(groups: Groups) -> None:
    stack = mx.random.normal((3, 8, 128), key=mx.random.key(4)).astype(mx.float16)
    importance = mx.random.uniform(0, 9, (3, 128), key=mx.random.key(5))
    together = dequantized(rounded(stack, groups, importance), mx.float32)
    apart = [
        dequantized(rounded(matrix, groups, own), mx.float32) for matrix, own in zip(stack, importance, strict=True)
    ]
    assert mx.array_equal(together, mx.stack(apart))
    errors = [squared_error(matrix, groups, own) for matrix, own in zip(stack, importance, strict=True)]
    assert squared_error(stack, groups, importance) == pytest.approx(sum(errors), rel=1e-4)
