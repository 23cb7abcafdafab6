"""Memory of native weights: no overhead, and none that stays when they are freed."""

import subprocess
import sys
from typing import cast

import mlx.core as mx
import pytest

from headrace.runtime.ops import Weight, native
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

# Layers of a llama of a billion weights: large matrices, and scales that have to fit between them.
_PROGRAM = """
import mlx.core as mx
from headrace.runtime.ops import Weight, native

def layer():
    kept = []
    for rows, columns in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)):
        packed = mx.ones((rows, columns // 8), mx.uint32)
        scales = mx.ones((rows, columns // 64), mx.float16)
        kept.append(native.prepare(Weight(packed, scales, scales, 4, 64), mx.float32))
    return kept

layers = [layer() for _ in range(4)]
held = mx.get_active_memory()
weights = sum(weight.nbytes for layer in layers for weight in layer)
room = 1.1 * weights + 40e6  # the last slab is not full
assert weights < held < room, (held, weights)
del layers
layers = [layer() for _ in range(4)]
assert mx.get_active_memory() < room, (mx.get_active_memory(), weights)
del layers
native.free_unused()
assert mx.get_active_memory() < 1024  # a constant
"""


def test_weight_slabs_are_filled_and_freed() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("group", [32, 128])
def test_matrices_are_interleaved_in_bands_of_32_rows(group: int) -> None:
    """Each band has word k of all its rows, then word k + 1; scales and biases alike."""
    data, scales, biases = mx.quantize(mx.random.normal((70, 1152)), bits=4, group_size=group)
    weight = Weight(data, scales.astype(mx.float16), biases.astype(mx.float16), bits=4, group_size=group)
    prepared = native.prepare(weight, mx.float32)
    for stored, moved in zip(weight.arrays, prepared.arrays, strict=True):
        bands = mx.pad(stored, [(0, 96 - 70), (0, 0)]).reshape(3, 32, -1)
        assert mx.array_equal(moved, bands.swapaxes(1, 2))


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize(
    ("scale", "offset"),
    [
        (0.1, None),
        (0.0, None),
        (-0.0, None),
        (2.0**-22, None),  # subnormal
        (60000.0, None),  # whose offset is beyond half precision
        (float("inf"), None),
        (0.1, 0.0),
        (0.0, 0.1),
        (0.1, 0.8),
    ],
)
def test_offsets_are_left_out_where_scales_give_them_exactly(bits: int, scale: float, offset: float | None) -> None:
    """One scale among others, and its offset; None: that of symmetric codes."""
    factor = -(2.0 ** (bits - 1))
    scales = mx.random.uniform(0.5, 2.0, (40, 8)).astype(mx.float16)
    scales[7, 3] = scale
    offsets = (scales * factor).astype(mx.float16)
    if offset is not None:
        offsets[7, 3] = offset
    is_exact = bool((scales.astype(mx.float32) * factor == offsets.astype(mx.float32)).all())
    data = mx.zeros((40, 256 * bits // 32), mx.uint32)
    prepared = native.prepare(Weight(data, scales, offsets, bits=bits, group_size=32), mx.float32)
    assert (prepared.biases is None) == is_exact
    assert is_exact == (offset is None and scale != 60000.0)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("rows", [(64, 32, 7), (32, 33, 7), (32, 32)])  # whole bands, and not
@pytest.mark.parametrize("symmetric", [False, True])
def test_joined_weights_equal_their_concatenation(bits: int, rows: tuple[int, ...], symmetric: bool) -> None:
    def quantized(count: int) -> Weight:
        data, scales, biases = mx.quantize(mx.random.normal((count, 128)), bits=bits, group_size=32)
        scales = scales.astype(mx.float16)
        biases = scales * -(2 ** (bits - 1)) if symmetric else biases.astype(mx.float16)
        return Weight(data, scales, biases, bits=bits, group_size=32)

    parts = [quantized(count).arrays for count in rows]
    mx.eval(parts)
    joined = [mx.concatenate(arrays) for arrays in zip(*parts, strict=True)]  # not made: the kernels take the parts
    whole = [mx.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    mx.eval(whole)
    ours, theirs = (
        native.prepare(Weight(data, scales, biases, bits=bits, group_size=32), mx.float32)
        for data, scales, biases in (joined, whole)
    )
    assert len(ours.arrays) == len(theirs.arrays) == 3 - symmetric
    for one, other in zip(ours.arrays, theirs.arrays, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("bits", [0, 4, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_read_in_a_block_equal_weights_read_immediately(bits: int, bias: bool) -> None:
    weight = Weight(mx.random.normal((40, 64)), bias=mx.random.normal((40,)) if bias else None)
    if bits:
        weight = Weight(*mx.quantize(weight.data, bits=bits, group_size=32), bits=bits, group_size=32, bias=weight.bias)
    at_once = native.prepare(weight, mx.float32)
    with native.read_together():
        later = native.prepare(weight, mx.float32)
        assert (later.rows, later.columns, later.nbytes) == (40, 64, 0)
    x = mx.random.normal((1, 3, 64))
    assert mx.array_equal(native.linear(x, later), native.linear(x, at_once))
    assert len(later.arrays) == len(at_once.arrays)
    for one, other in zip(later.arrays, at_once.arrays, strict=True):
        assert mx.array_equal(one, other)


def test_a_block_that_raises_reads_no_weights_and_delays_none() -> None:
    weight = Weight(mx.random.normal((16, 32)))
    lost: list[Weight] = []

    def fail() -> None:
        with native.read_together():
            lost.append(native.prepare(weight, mx.float32))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    matrix = cast(native.PreparedWeight, lost[0]).matrix
    with pytest.raises(RuntimeError):  # not the pointer of an array that was never read
        _ = matrix.data
    assert native.prepare(weight, mx.float32).nbytes == weight.nbytes
