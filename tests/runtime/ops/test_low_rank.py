"""Low-rank products of an adapter in the native kernels, against the weights' own products and those of float32."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import mlx.core as mx
import pytest

from headrace.runtime.ops import LowRank, Weight, native
from tests.support.kernels import INSTRUCTION_SETS, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

ROWS = 300
COLUMNS = 512


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def _weight(bits: int, bias: mx.array | None = None) -> Weight:
    values = 0.1 * mx.random.normal((ROWS, COLUMNS), key=mx.random.key(1))
    data, scales, biases = mx.quantize(values, group_size=32, bits=bits)
    return native.prepare(Weight(data, scales, biases, bits, 32, bias), mx.float32)


def _products(parts: Sequence[tuple[int, int, int]], dtype: mx.Dtype) -> list[LowRank]:
    """Return random products by first row, number of rows, and rank."""
    products = []
    for number, (row, rows, rank) in enumerate(parts):
        of_a, of_b = mx.random.split(mx.random.key(10 + number))
        a = mx.random.normal((rank, COLUMNS), key=of_a).astype(dtype)
        b = mx.random.normal((rows, rank), key=of_b).astype(dtype)
        products.append(LowRank(row, a, b, 0.02 * (number + 1)))
    return products


def _added(x: mx.array, products: Sequence[LowRank]) -> mx.array:
    """Return the sum of the products in float32."""
    total = mx.zeros((*x.shape[:-1], ROWS))
    for row, a, b, scale in products:
        product = scale * (x @ a.astype(mx.float32).T) @ b.astype(mx.float32).T
        total[..., row : row + b.shape[0]] += product
    return total


PARTS = {
    "whole": [(0, ROWS, 8)],
    "of rank 1": [(0, ROWS, 1)],
    "first and last": [(0, 96, 16), (192, 108, 16)],
    "of several ranks, within bands": [(5, 40, 3), (45, 100, 64), (250, 50, 8)],
}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_low_rank_products_are_added(parts: list[tuple[int, int, int]], dtype: mx.Dtype) -> None:
    x = mx.random.normal((1, 70, COLUMNS), key=mx.random.key(2))
    bias = mx.random.normal((ROWS,), key=mx.random.key(3))
    products = _products(parts, dtype)
    expected = native.linear(x, _weight(4, bias)) + _added(x, products)
    weight = _weight(4, bias)
    arrays = native.add_low_rank(weight, products)
    assert arrays is not None
    for rows in (1, 5, 70):
        ours = native.linear(x[:, :rows], weight)
        assert mx.abs(ours - expected[:, :rows]).max().item() < 1e-5 * mx.abs(expected).max().item()


def test_low_rank_products_are_added_before_activation_and_residual() -> None:
    x = mx.random.normal((1, 7, COLUMNS), key=mx.random.key(2))
    norm = mx.random.uniform(0.5, 1.5, (COLUMNS,), key=mx.random.key(4))
    products = _products([(0, 150, 8), (150, 150, 8)], mx.float32)
    plain = _weight(4)
    weight = _weight(4)
    native.add_low_rank(weight, products)
    gate_up = native.norm_linear(x, norm, 1e-5, plain) + _added(native.rms_norm(x, norm, 1e-5), products)
    expected = native.glu(gate_up[..., :150], gate_up[..., 150:], "silu")
    ours = native.norm_glu(x, norm, 1e-5, weight, "silu")
    assert mx.abs(ours - expected).max().item() < 1e-5 * mx.abs(expected).max().item()
    residual = mx.random.normal((1, 7, ROWS), key=mx.random.key(5))
    total = native.linear(x, plain) + _added(x, products) + residual
    assert mx.abs(native.linear_add(x, weight, residual) - total).max().item() < 1e-5 * mx.abs(total).max().item()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_row_has_the_same_bits_in_any_batch(bits: int) -> None:
    weight = _weight(bits)
    native.add_low_rank(weight, _products(PARTS["of several ranks, within bands"], mx.bfloat16))
    x = 3 * mx.random.normal((1, 40, COLUMNS), key=mx.random.key(6))
    native.set_threads(1)
    expected = mx.concatenate([native.linear(x[:, row : row + 1], weight) for row in range(40)], axis=1)
    for threads, counts in ((1, [40]), (2, [2, 3, 4, 5, 6, 7, 8, 5]), (3, [9, 1, 17, 13])):
        native.set_threads(threads)
        ends = list(accumulate(counts))
        batches = [native.linear(x[:, end - count : end], weight) for count, end in zip(counts, ends, strict=True)]
        assert mx.array_equal(mx.concatenate(batches, axis=1), expected)


def test_bindings_refuse_low_rank_products_of_wrong_shapes() -> None:
    a = mx.zeros((4, COLUMNS))
    b = mx.zeros((10, 4))
    ones = mx.ones((4,))
    for wrong in (
        (mx.zeros((4, COLUMNS - 1)), ones, [(0, b)]),
        (a.astype(mx.int32), ones, [(0, b)]),
        (a, ones[:3], [(0, b)]),
        (a, ones.astype(mx.float16), [(0, b)]),
        (a, ones, []),
        (a, ones, [(0, b[:, :3])]),
        (a, ones, [(0, b), (10, b)]),
        (a, ones, [(-1, b)]),
        (a, ones, [(ROWS - 9, b)]),
        (a, ones, [(0, b.astype(mx.uint32))]),
        (a, ones, [(0, b[0])]),
    ):
        weight = _weight(4)
        assert isinstance(weight, native.PreparedWeight)
        assert weight.matrix is not None
        with pytest.raises(ValueError, match=r"must|expected|once"):
            weight.matrix.add_low_rank(*wrong)
        weight.matrix.add_low_rank(a, ones, [(0, b)])
        with pytest.raises(ValueError, match="once"):
            weight.matrix.add_low_rank(a, ones, [(0, b)])
