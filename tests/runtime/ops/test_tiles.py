"""Prompts on AMX tiles, the processor's and emulated ones: products within a bound, the same bits in any company."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime import ops
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import AttentionSpec, LayerWeights, Rope, native
from tests.support.kernels import on_instruction_set
from tests.support.rounded_products import check_that_non_finite_values_show, product, quantized

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

_HALVES = 32
_FORMATS = [("affine", bits, group) for bits in (2, 4, 8) for group in (32, 128)]
_FORMATS += [(mode, *FLOAT_MODES[mode]) for mode in ("mxfp4", "nvfp4")]


@pytest.fixture(params=["amx", "amx-emulated"])
def tiles(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


@pytest.mark.sampled
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("mode", "bits", "group"), _FORMATS)
@given(st.integers(0, 2**31), st.integers(1, 70), st.integers(1, 70), st.integers(1, 20))
def test_products_are_within_two_to_the_minus_15(
    mode: str, bits: int, group: int, seed: int, length: int, rows: int, groups: int
) -> None:
    mx.random.seed(seed)
    weight = quantized(rows, groups * max(group, 32), mode, bits, group)
    x = mx.random.normal((length, weight.columns))
    full = mx.dequantize(weight.data, weight.scales, weight.biases, group, bits, mode=mode, dtype=mx.float32)
    # A weight is the difference of two terms, of up to twice the largest of its group.
    spread = mx.repeat(mx.abs(full).reshape(rows, -1, group).max(axis=-1), group, axis=-1)
    error = 2**-15 * (mx.abs(x) @ mx.abs(full).T) + 4e-6 * (mx.abs(x) @ spread.T) + 1e-6
    assert (mx.abs(product(x, weight, _HALVES) - x @ full.T) <= error).all().item()


@pytest.mark.usefixtures("tiles")
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    mx.random.seed(3)
    weight = quantized(97, 1056)
    x = mx.random.normal((600, 1056))
    every = product(x, weight, _HALVES)
    for begin, end in ((0, 1), (3, 5), (7, 23), (20, 37), (40, 149), (500, 600)):
        assert mx.array_equal(product(x[begin:end], weight, _HALVES), every[begin:end])


@pytest.mark.usefixtures("tiles")
def test_non_finite_values_are_not_hidden() -> None:
    check_that_non_finite_values_show(_HALVES)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_rows_of_prompts_use_tiles(tiles: str, phase: str) -> None:
    mx.random.seed(5)
    spec = AttentionSpec(2, 1, 32, 0.2, Rope(32, 10_000 ** (mx.arange(0, 32, 2) / 32)))
    shapes = ((128, 64), (64, 64), (256, 64), (64, 128))
    parts = [quantized(*shape) for shape in shapes]
    x = mx.random.normal((1, 4, 64))

    def layer(name: str) -> mx.array:
        assert native.use_instruction_set(name)
        qkv, output, gate_up, down = (native.prepare(part, mx.float32) for part in parts)
        weights = LayerWeights(spec, mx.ones(64), [qkv], output, None, mx.ones(64), [gate_up], down, None)
        node = native.fuse([weights], 1e-5, "silu")
        assert node is not None
        keys = mx.zeros((1, 1, 8, 32), mx.float16)
        values = mx.zeros((1, 1, 8, 32), mx.float16)
        mx.eval(keys, values)
        out = node(x, [keys], [values], 0, [0], "prefill" if phase == "prefill" else "decode", -1)
        mx.eval(out)
        return out

    theirs = layer("avx512")
    ours = layer(tiles)
    assert mx.array_equal(theirs, ours) == (phase == "decode")
    assert (mx.abs(theirs - ours).max() < 1e-3 * mx.abs(theirs).max()).item()


def test_tile_kernels_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "amx")
    assert native.status().instruction_set != "amx"
    with pytest.raises(UsageError, match="HEADRACE_KERNELS=amx"):
        ops.select()


def test_16_bit_halves_are_refused_without_tile_kernels() -> None:
    with pytest.raises(ValueError, match="16 or 8 bits"):
        product(mx.ones((1, 64)), quantized(8, 64), _HALVES)
