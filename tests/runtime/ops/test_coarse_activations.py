"""Products with activations in 8 bits, on every instruction set: those of the definition, in any company."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import AttentionSpec, LayerWeights, Rope, native, reference
from tests.support.kernels import INSTRUCTION_SETS, on_instruction_set
from tests.support.rounded_products import check_that_non_finite_values_show, product, quantized

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def _activations(rows: int, columns: int, outliers: int) -> mx.array:
    """Return normal numbers, some of which are up to a hundred times as large."""
    x = mx.random.normal((rows, columns))
    for _ in range(outliers):
        at = int(mx.random.randint(0, columns, ()).item())
        x[:, at] *= float(mx.random.uniform(1, 100).item())
    return x


_FORMATS = [("affine", bits, group) for bits in (2, 4, 8) for group in (32, 64, 128)]
_FORMATS += [(mode, *FLOAT_MODES[mode]) for mode in ("mxfp4", "nvfp4")]


@pytest.mark.sampled
@pytest.mark.parametrize(("mode", "bits", "group"), _FORMATS)
@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 19), st.integers(1, 70), st.integers(1, 20), st.integers(0, 5))
def test_8_bit_products_are_those_of_the_definition(
    mode: str, bits: int, group: int, seed: int, length: int, rows: int, groups: int, outliers: int
) -> None:
    mx.random.seed(seed)
    columns = groups * max(group, 32)
    weight = quantized(rows, columns, mode, bits, group)
    full = mx.dequantize(weight.data, weight.scales, weight.biases, group, bits, mode=mode, dtype=mx.float32)
    x = _activations(length, columns, outliers)
    rounded = reference.rounded_to_bytes(x, group)
    # A weight is the difference of two terms, of up to twice the largest of its group.
    spread = mx.repeat(mx.abs(full).reshape(rows, -1, group).max(axis=-1), group, axis=-1)
    error = 6e-6 * (mx.abs(x) @ spread.T) + 1e-6
    # Where a value lies halfway between two whole numbers, the last bit of a factor decides.
    halfway = mx.abs(rounded - reference.rounded_to_bytes(x * (1 + 3e-7), group)) @ mx.abs(full).T
    ours = product(x, weight, 8)
    assert (mx.abs(ours - rounded @ full.T) <= error + halfway).all().item()


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    mx.random.seed(3)
    weight = quantized(97, 640, "affine", 4, 32)
    x = _activations(150, 640, 4)
    every = product(x, weight, 8)
    for begin, end in ((0, 1), (3, 5), (7, 16), (20, 37), (40, 149)):
        assert mx.array_equal(product(x[begin:end], weight, 8), every[begin:end])


def test_non_finite_values_are_not_hidden() -> None:
    check_that_non_finite_values_show(8)
    assert mx.array_equal(product(mx.zeros((2, 256)), quantized(40, 256), 8), mx.zeros((2, 40)))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_prompt_rows_are_rounded_to_8_bits(phase: str) -> None:
    mx.random.seed(5)
    spec = AttentionSpec(2, 1, 32, 0.2, Rope(32, 10_000 ** (mx.arange(0, 32, 2) / 32)))
    shapes = ((128, 64), (64, 64), (256, 64), (64, 128))
    qkv, output, gate_up, down = (native.prepare(quantized(*shape, "affine", 4, 32), mx.float32) for shape in shapes)
    layer = LayerWeights(spec, mx.ones(64), [qkv], output, None, mx.ones(64), [gate_up], down, None)
    x = mx.random.normal((1, 4, 64))
    results = []
    for rounding in (16, 8):
        node = native.fuse([layer], 1e-5, "silu", rounding=rounding)
        assert node is not None
        keys = mx.zeros((1, 1, 8, 32), mx.float16)
        values = mx.zeros((1, 1, 8, 32), mx.float16)
        mx.eval(keys, values)
        results.append(node(x, [keys], [values], 0, [0], "prefill" if phase == "prefill" else "decode", -1))
    assert mx.array_equal(*results) == (phase == "decode")
    assert (mx.abs(results[1] - results[0]).max() < 0.05 * mx.abs(results[0]).max()).item()
