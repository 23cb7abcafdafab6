"""Our arrays against the reference dequantizer of the `gguf` package, on arbitrary blocks of every tensor type."""

import gguf
import mlx.core as mx
import numpy as np
import pytest

from headrace.models.gguf import header, tensors
from headrace.models.gguf.container import RawTensor
from headrace.models.gguf.header import BLOCKS
from headrace.models.gguf.tensors import GROUP_SIZE, Affine, to_affine, to_mxfp4, to_plain
from headrace.runtime.errors import CheckpointError
from headrace.runtime.ops import groups_of_16, native
from headrace.runtime.ops.native_plans import missing
from tests.support.gguf_models import SCALES_AT, random_blocks

ROWS = 24
COLUMNS = 512
HALF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
WIDE = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # whose scales take more than half precision
EXACT = (*HALF, *WIDE)
LOW = ("Q2_K", "Q3_K", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
REQUANTIZED = (*LOW, "IQ1_M", "Q6_K")  # the last where nothing reads groups of 16


@pytest.fixture(autouse=True, params=["kernels", "numpy"])
def unpackers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds for both, except `kernels_only`."""
    if request.param == "numpy":
        monkeypatch.setattr(tensors, "_kernels_unpack", lambda _: False)
    elif missing is not None:
        pytest.skip(missing)


kernels_only = pytest.mark.parametrize("unpackers", ["kernels"], indirect=True)


def raw(kind: str, data: np.ndarray, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> RawTensor:
    return RawTensor("t", kind, shape, data)


def blocks_of(kind: str, seed: int = 0) -> np.ndarray:
    return random_blocks(np.random.default_rng(seed), kind, ROWS, COLUMNS)


def set_scales(data: np.ndarray, kind: str, value: float) -> None:
    size = BLOCKS[kind][1]
    for start in SCALES_AT[kind]:
        data.reshape(-1, size)[:, start : start + 2] = np.array([value], np.float16).view(np.uint8)


def reference(kind: str, data: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(ROWS, COLUMNS)


def evaluated(affine: Affine) -> np.ndarray:
    """q * scale + bias in float32, by MLX."""
    scales, biases = (mx.array(x).astype(mx.float32) for x in (affine.scales, affine.biases))
    weight = mx.array(affine.weight)
    if affine.groups.group_size == 16:
        return np.array(groups_of_16.dequantized(weight, scales, biases))
    return np.array(mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=affine.groups.bits))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("seed", range(5))
def test_exact_types_equal_the_reference_bit_for_bit(kind: str, seed: int) -> None:
    data = blocks_of(kind, seed)
    affine = to_affine(raw(kind, data))
    ours = evaluated(affine)
    theirs = reference(kind, data)
    # Adding +0.0 removes the one freedom there is: the sign of a zero.
    np.testing.assert_array_equal((ours + 0.0).view(np.uint32), (theirs + 0.0).view(np.uint32))
    assert affine.max_error == 0


@pytest.mark.parametrize("kind", EXACT)
def test_exact_types_stay_exact_at_the_extremes_of_half_precision(kind: str) -> None:
    smallest = 2.0**-24
    largest = 65504.0
    for value in (smallest, -smallest, largest, -largest, 0.0):
        data = blocks_of(kind)
        set_scales(data, kind, value)
        affine = to_affine(raw(kind, data))
        np.testing.assert_array_equal(evaluated(affine), reference(kind, data))


@pytest.mark.parametrize("kind", HALF)
def test_scales_and_biases_are_half_precision_where_that_is_exact(kind: str) -> None:
    data = blocks_of(kind)
    affine = to_affine(raw(kind, data))
    assert affine.scales.dtype == affine.biases.dtype == np.float16
    set_scales(data, kind, 65504.0)
    overflowing = to_affine(raw(kind, data))
    assert overflowing.scales.dtype == (np.float16 if kind.endswith("1") else np.float32)


@pytest.mark.parametrize("kind", WIDE)
def test_k_quants_keep_their_products_in_single_precision(kind: str) -> None:
    affine = to_affine(raw(kind, blocks_of(kind)))
    assert affine.scales.dtype == affine.biases.dtype == np.float32


@pytest.mark.sampled
@pytest.mark.parametrize("kind", REQUANTIZED)
@pytest.mark.parametrize("scale", [None, 1e-6, 6000.0])
def test_other_types_become_8_bit_within_half_a_step(kind: str, scale: float | None) -> None:
    data = blocks_of(kind)
    if scale is not None:
        set_scales(data, kind, scale)
    affine = to_affine(raw(kind, data), groups_of_16=False)
    theirs = reference(kind, data)
    difference = np.abs(evaluated(affine).astype(np.float64) - theirs)
    step = affine.scales.astype(np.float64).repeat(GROUP_SIZE, axis=1)
    rounding = 2.0**-22 * np.abs(theirs).max()  # of evaluating q * scale + bias in float32
    assert (affine.groups.bits, affine.groups.group_size) == (8, 32)
    assert (difference <= step / 2 + rounding).all()
    assert affine.max_error == pytest.approx(difference.max(), rel=1e-3)


def test_a_requantized_tensor_of_one_value_is_exact() -> None:
    data = blocks_of("Q6_K")
    set_scales(data, "Q6_K", 0.0)
    affine = to_affine(raw("Q6_K", data), groups_of_16=False)
    assert affine.max_error == 0
    assert not evaluated(affine).any()


def mxfp4_of_every_scale() -> np.ndarray:
    data = random_blocks(np.random.default_rng(0), "MXFP4", ROWS, COLUMNS)
    data.reshape(-1, 17)[:252, 0] = np.arange(252)
    return data


def test_mxfp4_is_exact_as_a_matrix_and_as_experts() -> None:
    data = mxfp4_of_every_scale()
    theirs = reference("MXFP4", data)
    normal = np.abs(theirs) >= 2.0**-126  # MLX takes what is smaller for zero
    matrix = evaluated(to_affine(raw("MXFP4", data)))
    np.testing.assert_array_equal(matrix[normal], theirs[normal])
    experts = to_mxfp4(raw("MXFP4", data, (3, ROWS // 3, COLUMNS)))
    assert (experts.weight.shape, experts.scales.shape) == ((3, ROWS // 3, COLUMNS // 8), (3, ROWS // 3, COLUMNS // 32))
    words = mx.array(experts.weight)
    scales = mx.array(experts.scales)
    got = np.array(mx.dequantize(words, scales, mode="mxfp4", dtype=mx.float32)).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(got[normal], theirs[normal])


def test_an_mxfp4_scale_that_is_no_number_is_refused() -> None:
    data = mxfp4_of_every_scale()
    data.reshape(-1, 17)[252, 0] = 252
    with pytest.raises(CheckpointError, match="not finite"):
        to_affine(raw("MXFP4", data))
    with pytest.raises(CheckpointError, match="not finite"):
        to_mxfp4(raw("MXFP4", data, (3, ROWS // 3, COLUMNS)))


def test_experts_are_one_matrix_above_the_other() -> None:
    data = blocks_of("Q5_K")
    flat = to_affine(raw("Q5_K", data))
    experts = to_affine(raw("Q5_K", data, (3, ROWS // 3, COLUMNS)))
    for name in ("weight", "scales", "biases"):
        ours = getattr(experts, name)
        assert ours.shape[:2] == (3, ROWS // 3)
        np.testing.assert_array_equal(ours.reshape(ROWS, -1), getattr(flat, name))


@pytest.mark.sampled(always=["numpy-inf-Q4_1"])  # has a bias
@pytest.mark.parametrize("kind", [*EXACT, *LOW])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(kind: str, value: float) -> None:
    for start in SCALES_AT[kind]:
        data = blocks_of(kind)
        data.reshape(-1, BLOCKS[kind][1])[5, start : start + 2] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(CheckpointError, match="not finite"):
            to_affine(raw(kind, data))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types_keep_their_bytes_and_refuse_nan(kind: str) -> None:
    data = blocks_of(kind)
    words, dtype = to_plain(raw(kind, data))
    assert dtype == kind
    assert words.tobytes() == data.tobytes()
    data[3, -4:] = 0xFF  # NaN in all three formats
    with pytest.raises(CheckpointError, match="NaN"):
        to_plain(raw(kind, data))


@pytest.mark.parametrize("kind", [*EXACT, *LOW])
def test_quantized_vectors_become_their_exact_float32_values(kind: str) -> None:
    data = random_blocks(np.random.default_rng(0), kind, 1, COLUMNS)
    words, dtype = to_plain(raw(kind, data, (COLUMNS,)))
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])[0]
    assert dtype == "F32"
    np.testing.assert_array_equal(words, theirs)


def test_large_tensors_are_unpacked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = blocks_of("Q5_K")
    whole = to_affine(raw("Q5_K", data))
    monkeypatch.setattr(tensors, "_CHUNK_WEIGHTS", 1280)
    chunked = to_affine(raw("Q5_K", data))
    for name in ("weight", "scales", "biases"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(chunked, name))


@kernels_only
def test_kernels_and_numpy_unpack_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any count of rows and threads, and in the type of scales that a file of that type has."""
    threads = native.status().threads
    for kind in (*EXACT, "MXFP4"):
        for rows, count in ((1, 1), (7, 2), (129, 3)):
            data = random_blocks(np.random.default_rng(rows), kind, rows, COLUMNS)
            tensor = raw(kind, data, (rows, COLUMNS))
            native.set_threads(count)
            ours = to_affine(tensor)
            native.set_threads(threads or 0)
            with monkeypatch.context() as patch:
                patch.setattr(tensors, "_kernels_unpack", lambda _: False)
                theirs = to_affine(tensor)
            for name in ("weight", "scales", "biases"):
                assert getattr(ours, name).dtype == getattr(theirs, name).dtype
                assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes(), (kind, rows, name)


@kernels_only
def test_kernels_refuse_arrays_that_do_not_fit() -> None:
    blocks = np.zeros((2, 18), np.uint8)
    codes = np.empty((2, 16), np.uint8)
    scales = np.empty(2, np.float16)
    native.unpack_blocks("Q4_0", blocks, codes, scales, scales.copy())
    for arrays in (
        ("Q4_9", blocks, codes, scales, scales),
        ("Q4_0", blocks.reshape(-1)[1:], codes, scales, scales),
        ("Q4_0", blocks, codes[:1], scales, scales),
        ("Q4_0", blocks, codes, scales[:1], scales),
        ("Q4_0", blocks, codes, scales, None),
        ("Q4_0", blocks, codes, scales, scales.astype(np.float32)),
        ("Q4_0", blocks, codes, scales.view(np.uint16), scales.view(np.uint16)),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            native.unpack_blocks(*arrays)
    for strided in (blocks[:, ::2], blocks.astype(np.float32)):
        with pytest.raises(TypeError):
            native.unpack_blocks("Q4_0", strided, codes, scales, scales)


def test_numbers_of_gguf_tensor_types_are_those_of_the_gguf_package() -> None:
    assert {number: gguf.GGMLQuantizationType(number).name for number in header._NUMBERS} == header._NUMBERS
    assert set(header._NUMBERS.values()) == set(BLOCKS)
