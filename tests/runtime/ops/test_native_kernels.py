"""Every native kernel against the MLX reference operation, in float32, on every instruction set of this machine.

Bounds. Exact projections differ from the reference by the order of additions: at most 1e-6 of the sum of absolute
products. Otherwise activations for 2-, 4-, 5-, 6- or 8-bit weights are rounded to 16 bits first: each by at most the
largest of its group / 65534, times its weight. Attention over float32 K/V is within 2e-5 of the largest output;
half-precision K/V are rounded alike on both sides, so cache rows may differ by one unit in the last place, and
outputs accordingly.
"""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import AttentionSpec, Phase, Rope, Weight, Xielu, groups_of_16, native, reference
from tests.support.kernels import INSTRUCTION_SETS, Exact, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

_FLOATS = [mx.float32, mx.float16, mx.bfloat16]
_ULP = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def _difference(ours: mx.array, theirs: mx.array) -> float:
    """Return the largest difference relative to the largest expected value."""
    assert ours.shape == theirs.shape
    if ours.size == 0:
        return 0.0
    theirs = theirs.astype(mx.float32)
    largest = mx.maximum(mx.abs(theirs).max(), 1e-6)
    return float((mx.abs(ours.astype(mx.float32) - theirs).max() / largest).item())


def _agree(ours: mx.array, theirs: mx.array, error: mx.array) -> bool:
    assert ours.shape == theirs.shape
    return bool((mx.abs(ours - theirs) <= error + 1e-7).all().item())


def _held(weight: Weight, exact: bool) -> Weight:
    return (Exact() if exact else native).prepare(weight, mx.float32)


def _reference(weight: Weight) -> Weight:
    """Return the weight for stock MLX: groups of 16 by their values."""
    if weight.group_size == 16:
        assert weight.scales is not None
        assert weight.biases is not None
        weight = Weight(groups_of_16.dequantized(weight.data, weight.scales, weight.biases), bias=weight.bias)
    return reference.prepare(weight, mx.float32)


def _sums_and_errors(x: mx.array, weight: Weight, exact: bool) -> tuple[mx.array, mx.array]:
    """Return for every output the sum over k of |x w| and the error bound of the kernels."""
    w = _reference(weight)
    plain = w.data if w.scales is None else mx.dequantize(w.data, w.scales, w.biases, w.group_size, w.bits)
    full = mx.abs(plain.astype(mx.float32)).T  # (K, N)
    sums = mx.abs(x) @ full
    if w.bias is not None:
        sums = sums + mx.abs(w.bias)
    errors = 1e-6 * sums
    if weight.scales is not None:  # a weight is the difference of two terms of about this size
        scales = mx.abs(weight.scales.astype(mx.float32))
        spread = mx.repeat(scales, weight.group_size, axis=-1) * 2**weight.bits
        errors = errors + 1e-6 * (mx.abs(x) @ spread.T)
    if weight.bits in (2, 4, 5, 6, 8) and not exact:
        largest = mx.abs(x).reshape(*x.shape[:-1], -1, weight.group_size).max(axis=-1)
        errors = errors + mx.repeat(largest, weight.group_size, axis=-1) / 65534 @ full
    return sums, errors


def _floats(rows: int, columns: int, mode: str, bias: bool) -> Weight:
    """Return weights with all codes, and scales of all usual magnitudes."""
    bits, group = FLOAT_MODES[mode]
    plain = mx.random.normal((rows, columns)) * 2.0 ** mx.random.randint(-6, 7, (rows, 1))
    data, scales = mx.quantize(plain, group_size=group, bits=bits, mode=mode)
    data = mx.random.randint(0, 1 << 16, data.shape).astype(mx.uint32) * mx.array(65537, mx.uint32)
    if bits == 8:  # all but E4M3's NaN
        data = mx.bitwise_and(data, mx.array(0xF7F7F7F7, mx.uint32))
    return Weight(data, scales, None, bits, group, mx.random.normal((rows,)) if bias else None, mode)


def _weight(rows: int, columns: int, bits: int, group: int, dtype: mx.Dtype, bias: bool) -> Weight:
    plain = mx.random.normal((rows, columns))
    extra = mx.random.normal((rows,)) if bias else None
    if bits == 0:
        return Weight(plain.astype(dtype), bias=extra)
    if group == 16:
        return _sixteen(rows, columns, dtype, extra)
    data, scales, biases = mx.quantize(plain, group_size=group, bits=bits)
    return Weight(data, scales.astype(dtype), biases.astype(dtype), bits, group, extra)


def _sixteen(rows: int, columns: int, dtype: mx.Dtype, extra: mx.array | None) -> Weight:
    """Return 6-bit weights in groups of 16, with arbitrary words and scales (MLX has no quantizer for them)."""
    data = mx.random.randint(0, 2**31 - 1, (rows, columns * 6 // 32)).astype(mx.uint32) * 2 + 1
    scales = mx.random.normal((rows, columns // 16)) / 32
    return Weight(data, scales.astype(dtype), (-32 * scales).astype(dtype), 6, 16, extra)


def _symmetric(weight: Weight) -> Weight:
    """Return the integers with a zero in the middle, as of Q4_0 and Q8_0."""
    assert weight.scales is not None
    return replace(weight, biases=-(2 ** (weight.bits - 1)) * weight.scales)


@pytest.mark.parametrize(
    ("bits", "group", "scales"), [*((bits, 64, mx.float16) for bits in (4, 5, 6, 8)), (6, 16, mx.float32)]
)
def test_symmetric_weights_have_no_offsets(bits: int, group: int, scales: mx.Dtype) -> None:
    weight = _symmetric(_weight(70, 256, bits, group, scales, bias=False))
    assert weight.scales is not None
    held = _held(weight, False)
    assert held.biases is None
    assert held.nbytes == weight.data.nbytes * 96 // 70 + weight.scales.nbytes * 96 // 70  # whole bands of 32 rows
    assert _held(weight, True).biases is not None
    weight.scales[69, 3] *= 2  # a single offset is another one
    assert _held(weight, False).biases is not None


@st.composite
def _projections(draw: st.DrawFn) -> tuple[Weight, mx.array]:
    """A weight of any format and activations (B, T, K), sometimes strided or broadcast."""
    mx.random.seed(draw(st.integers(0, 2**31)))
    bits = draw(st.sampled_from([0, 2, 3, 4, 5, 6, 8]))
    groups = [32, 64, 128] if bits != 6 else [16, 32, 64, 128]
    group = draw(st.sampled_from(groups)) if bits else 0
    columns = draw(st.integers(1, 9)) * max(group, 32) if bits else draw(st.integers(1, 300))
    rows = draw(st.integers(1, 150))
    weight = _weight(rows, columns, bits, group, draw(st.sampled_from(_FLOATS)), draw(st.booleans()))
    if bits and draw(st.booleans()):
        weight = _symmetric(weight)
    batch = draw(st.integers(1, 3))
    length = draw(st.integers(1, 40))
    match draw(st.sampled_from(["plain", "strided", "broadcast", "transposed"])):
        case "strided":
            x = mx.random.normal((batch, length, 2 * columns))[..., ::2]
        case "broadcast":
            x = mx.broadcast_to(mx.random.normal((1, 1, columns)), (batch, length, columns))
        case "transposed":
            x = mx.random.normal((batch, columns, length)).swapaxes(1, 2)
        case _:
            x = mx.random.normal((batch, length, columns))
    return weight, x


@given(_projections(), st.booleans())
def test_projections_match_the_reference(case: tuple[Weight, mx.array], exact: bool) -> None:
    weight, x = case
    ours = _held(weight, exact)
    theirs = _reference(weight)
    norm = mx.random.normal((weight.columns,))
    _, error = _sums_and_errors(x, weight, exact)
    assert _agree(native.linear(x, ours), reference.linear(x, theirs), error)
    residual = mx.random.normal((*x.shape[:2], weight.rows))
    assert _agree(native.linear_add(x, ours, residual), reference.linear_add(x, theirs, residual), error + 3e-6)
    _, error = _sums_and_errors(reference.rms_norm(x, norm, 1e-5), weight, exact)
    assert _agree(native.norm_linear(x, norm, 1e-5, ours), reference.norm_linear(x, norm, 1e-5, theirs), error)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", FLOAT_MODES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (45, 96), (130, 416), (33, 3328)])
def test_products_of_quantized_floats_match_the_reference(mode: str, exact: bool, rows: int, columns: int) -> None:
    mx.random.seed(rows)
    weight = _floats(rows, columns, mode, rows % 2 == 0)
    ours = _held(weight, exact)
    theirs = reference.prepare(weight, mx.float32)
    assert ours.matrix is not None  # type: ignore[attr-defined]
    plain = mx.dequantize(weight.data, weight.scales, None, weight.group_size, weight.bits, mode, dtype=mx.float32)
    for length in (1, 2, 7, 19, 70):
        x = mx.random.normal((1, length, columns))
        sums = mx.abs(x) @ mx.abs(plain).T
        largest = mx.abs(x).reshape(1, length, -1, weight.group_size).max(axis=-1)
        rounding = mx.repeat(largest, weight.group_size, axis=-1) / 65534 @ mx.abs(plain).T
        # a weight is the difference of two terms, up to six of the largest a group can hold
        spread = mx.repeat(mx.abs(plain).reshape(rows, -1, weight.group_size).max(axis=-1), weight.group_size, axis=-1)
        error = 2e-6 * sums + (0 if exact or mode == "mxfp8" else rounding + 6e-6 * (mx.abs(x) @ spread.T))
        expected = x @ plain.T + (0 if weight.bias is None else weight.bias)
        assert _agree(native.linear(x, ours), expected, error)
    tokens = mx.random.randint(0, rows, (2, 9))
    assert _difference(native.embed(tokens, ours, mx.float32), reference.embed(tokens, theirs, mx.float32)) < 1e-6


@given(_projections(), st.booleans())
def test_embedding_matches_the_reference(case: tuple[Weight, mx.array], exact: bool) -> None:
    weight, _ = case
    held = _held(weight, exact)
    table = _reference(weight)
    assert (held.rows, held.columns) == (weight.rows, weight.columns)
    tokens = mx.random.randint(0, weight.rows, (3, 14))[:, ::2]
    expected = reference.embed(tokens, table, mx.float32)
    assert _difference(native.embed(tokens, held, mx.float32), expected) < 1e-6
    assert mx.array_equal(
        native.embed(tokens.astype(mx.uint32), held, mx.float32), native.embed(tokens, held, mx.float32)
    )
    beyond = native.embed(mx.array([[0, weight.rows, -1]]), held, mx.float32)
    assert mx.isnan(beyond).all(axis=-1).tolist() == [[False, True, True]]
    later = mx.arange(weight.rows + 14)[None]  # of a table whose first row is that of token 7
    parts = [embed(later, w, mx.float32, 7) for embed, w in ((native.embed, held), (reference.embed, table))]
    assert _difference(*parts) < 1e-6
    assert mx.any(parts[0] != 0, axis=-1).tolist() == [
        [7 <= token < weight.rows + 7 for token in range(weight.rows + 14)]
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 70])
@pytest.mark.parametrize("exact", [False, True])
def test_long_rows_match_the_reference(bits: int, length: int, exact: bool) -> None:
    """More values of k than any kernel takes at once."""
    weight = _weight(45, 3328, bits, 128, mx.float16, False)
    x = mx.random.normal((1, length, 3328))
    ours = _held(weight, exact)
    theirs = reference.prepare(weight, mx.float32)
    _, error = _sums_and_errors(x, weight, exact)
    assert _agree(native.linear(x, ours), reference.linear(x, theirs), error)


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [0, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 20])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("exact", [False, True])
def test_non_finite_values_are_not_hidden(bits: int, length: int, value: float, exact: bool) -> None:
    weight = _held(_weight(40, 256, bits, 32 if bits else 0, mx.float16, False), exact)
    x = mx.random.normal((1, length, 256))
    x[0, length - 1, 100] = value
    out = native.linear(x, weight)
    assert not mx.isfinite(out[0, length - 1]).any().item()
    assert mx.isfinite(out[0, : length - 1]).all().item()


@given(_projections(), st.sampled_from(["silu", "gelu"]), st.booleans())
def test_gated_units_match_the_reference(case: tuple[Weight, mx.array], activation: str, exact: bool) -> None:
    weight, x = case
    if weight.rows % 2:
        weight = Weight(
            *(None if a is None else mx.concatenate([a, a]) for a in (weight.data, weight.scales, weight.biases)),
            weight.bits,
            weight.group_size,
        )
    ours = _held(weight, exact)
    theirs = _reference(weight)
    norm = mx.random.normal((weight.columns,))
    sums, errors = _sums_and_errors(reference.rms_norm(x, norm, 1e-5), weight, exact)
    (gate, up), (gate_error, up_error) = mx.split(sums, 2, axis=-1), mx.split(errors, 2, axis=-1)
    error = 1.2 * (gate_error * (up + up_error) + gate * up_error)  # neither activation is steeper than 1.2
    expected = reference.norm_glu(x, norm, 1e-5, theirs, activation)
    assert _agree(native.norm_glu(x, norm, 1e-5, ours, activation), expected, error + 1e-6 * (gate * up + gate + up))


@given(_projections(), st.sampled_from([Xielu(0.9, 1.2, 0.5, -1e-6), Xielu(2.0, 0.4, -0.3, -1e-2)]))
def test_units_without_a_gate_match_the_reference(case: tuple[Weight, mx.array], curve: Xielu) -> None:
    weight, x = case
    ours = _held(weight, exact=True)
    theirs = _reference(weight)
    norm = mx.random.normal((weight.columns,))
    sums, errors = _sums_and_errors(reference.rms_norm(x, norm, 1e-5), weight, exact=True)
    for activation in ("relu2", "tanh_gelu", "erf_gelu", curve):
        expected = reference.norm_glu(x, norm, 1e-5, theirs, activation)
        bound = (4 * sums + 2 * errors + 3) * (errors + 1e-6 * sums)  # no steeper than that
        assert _agree(native.norm_glu(x, norm, 1e-5, ours, activation), expected, bound)


@pytest.mark.parametrize("bits", [0, 4])
def test_empty_batches_are_accepted(bits: int) -> None:
    # (MLX's own quantized_matmul divides by zero here, so there is nothing to compare with.)
    weight = native.prepare(_weight(10, 64, bits, 32 if bits else 0, mx.float16, False), mx.float32)
    assert native.linear(mx.zeros((1, 0, 64)), weight).tolist() == [[]]
    assert native.norm_glu(mx.zeros((2, 0, 64)), mx.ones((64,)), 1e-5, weight, "silu").shape == (2, 0, 5)


@given(st.integers(0, 5), st.integers(1, 700), st.integers(0, 2**31))
def test_rms_norm_matches_the_reference(rows: int, columns: int, seed: int) -> None:
    mx.random.seed(seed)
    x = mx.random.normal((1, rows, columns))
    weight = mx.random.normal((columns,))
    assert _difference(native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)) < 1e-5


@st.composite
def _attentions(draw: st.DrawFn) -> tuple[AttentionSpec, int, int, int, mx.Dtype]:
    """A layout, B, T, offset and the K/V type."""
    mx.random.seed(draw(st.integers(0, 2**31)))
    kv_heads = draw(st.integers(1, 3))
    shared = draw(st.integers(1, 6))
    dim = draw(st.sampled_from([16, 32, 48, 64, 80, 128, 256, 512]))
    dims = draw(st.sampled_from([dim, dim // 2]))
    rope = Rope(dims, 10_000 ** (mx.arange(0, dims, 2) / dims), draw(st.sampled_from([1.0, 1.25])))
    normed = draw(st.booleans())
    spec = AttentionSpec(
        kv_heads * shared,
        kv_heads,
        dim,
        dim**-0.5,
        draw(st.sampled_from([rope, None])),
        mx.random.normal((dim,)) if normed else None,
        mx.random.normal((dim,)) if normed else None,
        1e-6,
        draw(st.sampled_from([None, 1, 5, 70])),
        softcap := draw(st.sampled_from([None, 5.0])),
        2 * mx.random.normal((kv_heads * shared,)) if softcap is None and draw(st.booleans()) else None,
        v_norm=draw(st.booleans()),
        projects=draw(st.sampled_from(["q", "qk", "qkv", "qkv"])),
        chunked=draw(st.booleans()),
        growth=draw(st.sampled_from([None, (0.3, 7, 0), (0.1, 8, 1)])),
    )
    length = draw(st.sampled_from([1, 1, 2, 4, 5, 47, 48, 49, 110]))
    return spec, draw(st.integers(1, 2)), length, draw(st.integers(0, 300)), draw(st.sampled_from(_FLOATS))


@given(_attentions())
def test_attention_matches_the_reference(case: tuple[AttentionSpec, int, int, int, mx.Dtype]) -> None:
    spec, batch, length, offset, dtype = case
    shape = (batch, spec.kv_heads, offset + length + 3, spec.head_dim)
    keys = mx.random.normal(shape).astype(dtype)
    values = mx.random.normal(shape).astype(dtype)
    rows = spec.heads + (len(spec.projects) - 1) * spec.kv_heads
    qkv = mx.random.normal((batch, length, rows * spec.head_dim))
    theirs = reference.attend([qkv], mx.array(keys), mx.array(values), offset, spec)
    mx.eval(keys, values, qkv, theirs)
    phases: tuple[Phase, ...] = ("prefill", "decode") if length <= 16 else ("prefill",)
    for phase in phases:
        ours = native.attend([qkv], mx.array(keys), mx.array(values), offset, spec, 0, phase)
        mx.eval(ours)
        for mine, expected in zip(ours, theirs, strict=True):
            assert _difference(mine, expected) < _ULP[dtype]


def test_buffers_are_written_in_place() -> None:
    spec = AttentionSpec(2, 1, 64, 0.125)
    keys, values = (mx.zeros((1, 1, 1 << 16, 64), mx.float16) for _ in range(2))  # 8 MB each
    qkv = mx.random.normal((1, 1, 4 * 64))
    mx.eval(keys, values, qkv)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for offset in range(8):
        out, keys, values = native.attend([qkv], keys, values, offset, spec)
        mx.async_eval(out)
    mx.synchronize()
    assert mx.get_peak_memory() - before < 1 << 20


def test_one_token_at_a_time_equals_all_at_once() -> None:
    mx.random.seed(3)
    rope = Rope(64, 10_000 ** (mx.arange(0, 64, 2) / 64))
    spec = AttentionSpec(4, 2, 64, 0.125, rope)
    qkv = mx.random.normal((1, 70, 8 * 64))
    whole, *_ = native.attend([qkv], mx.zeros((1, 2, 70, 64)), mx.zeros((1, 2, 70, 64)), 0, spec)
    keys = mx.zeros((1, 2, 70, 64))
    values = mx.zeros((1, 2, 70, 64))
    outs = []
    for t in range(70):
        out, keys, values = native.attend([qkv[:, t : t + 1]], keys, values, t, spec)
        mx.eval(out)
        outs.append(out)
    assert _difference(mx.concatenate(outs, axis=1), whole) < 1e-5


def test_invalid_arguments_are_refused_before_evaluation() -> None:
    weight = native.prepare(Weight(mx.zeros((8, 64))), mx.float32)
    with pytest.raises(ValueError, match="last axis"):
        native.linear(mx.zeros((1, 1, 32)), weight)
    interleaved = native.prepare(_weight(8, 64, 4, 32, mx.float16, False), mx.float32)
    with pytest.raises(ValueError, match="float32"):
        native.linear(mx.zeros((1, 1, 64), mx.float16), interleaved)
    spec = AttentionSpec(2, 1, 64, 0.125)
    for offset in (3, 2**31 - 1):  # and one row more is no 32-bit number
        with pytest.raises(ValueError, match="room"):
            native.attend([mx.zeros((1, 2, 256))], mx.zeros((1, 1, 4, 64)), mx.zeros((1, 1, 4, 64)), offset, spec)


def test_unsupported_calls_run_on_the_reference_and_are_counted() -> None:
    before = sum(native.status().fallbacks.values())
    weight = native.prepare(Weight(mx.ones((8, 64))), mx.float16)
    assert mx.array_equal(native.linear(mx.ones((1, 1, 64), mx.float16), weight), mx.full((1, 1, 8), 64, mx.float16))
    assert sum(native.status().fallbacks.values()) == before + 1
