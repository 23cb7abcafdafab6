"""Recurrent layers, activations, and attention and rotation of given heads on the native kernels.

Each against stock MLX on every instruction set of this machine, and against itself: a token has the same bits alone,
with other sequences, and however its prompt is cut.
"""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.runtime.ops import MixerSizes, MixerSpec, Rope, WkvVectors, native, reference
from headrace.runtime.ops.native_plans import kernels
from tests.support.kernels import INSTRUCTION_SETS, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

B = 2
HK = 2
HV = 4
DK = 32
DV = 37


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def close(ours: mx.array, wanted: mx.array) -> bool:
    assert ours.shape == wanted.shape
    return bool((mx.abs(ours - wanted).max() <= 2e-5 * mx.abs(wanted).max()).item())


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_activations_match_the_reference(activation: str) -> None:
    x = mx.random.normal((2, 3, 19)) * 3
    up = mx.random.normal((2, 3, 19))
    assert close(native.activate(x, activation), reference.activate(x, activation))
    assert close(native.glu(x, up, activation), reference.glu(x, up, activation))


@pytest.mark.parametrize("activation", ["relu2", "tanh_gelu"])
def test_an_activation_without_a_gate_is_refused(activation: str) -> None:
    x = mx.ones((1, 1, 8))
    with pytest.raises(KeyError):
        native.glu(x, x, activation)
    with pytest.raises(KeyError):
        native.activate(x, activation)
    for up in (x, None):
        with pytest.raises(ValueError, match="activation"):
            kernels.gated(x, up, activation)


@pytest.mark.parametrize("width", [1, 19, 768])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_matches_the_reference(width: int, *, biased: bool) -> None:
    x = mx.random.normal((2, 40, width)) + 3
    weight = mx.random.normal((width,))
    bias = mx.random.normal((width,)) if biased else None
    ours = native.layer_norm(x, weight, bias, 1e-2)
    assert close(ours, reference.layer_norm(x, weight, bias, 1e-2))
    assert mx.array_equal(native.layer_norm(x[1:, 5:6], weight, bias, 1e-2), ours[1:, 5:6])


def test_layer_norm_of_another_type_runs_on_stock_mlx() -> None:
    x = mx.random.normal((3, 32)).astype(mx.float16)
    weight = mx.ones((32,), mx.float16)
    assert mx.array_equal(native.layer_norm(x, weight, None, 1e-5), reference.layer_norm(x, weight, None, 1e-5))


def heads(length: int, entries: int) -> list[mx.array]:
    """Return queries, and K/V that are slices of buffers with more room."""
    mx.random.seed(length)
    q = mx.random.normal((B, length, 4, DK)).transpose(0, 2, 1, 3)
    return [q, *(mx.random.normal((B, 2, entries + 9, DK))[:, :, :entries] for _ in range(2))]


@pytest.mark.parametrize("sinks", [None, mx.array([0.3, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("phase", ["prefill", "decode", None])
def test_causal_attention_over_heads_matches_the_reference(phase: str | None, sinks: mx.array | None) -> None:
    for length, entries in ((1, 1), (1, 300), (3, 200), (70, 70), (50, 190)):
        inputs = heads(length, entries)
        mask = "causal" if length > 1 else None
        ours, wanted = (ops.attend_heads(*inputs, 0.2, mask, sinks, phase) for ops in (native, reference))
        assert close(ours, wanted)
        alone = native.attend_heads(*(x[1:] for x in inputs), 0.2, mask, sinks, phase)
        assert mx.array_equal(alone, ours[1:])


def test_masked_attention_over_heads_matches_the_reference() -> None:
    """Windows, holes, and masks that differ by sequence; every row sees its own entry."""
    q, keys, values = heads(20, 150)
    seen = mx.random.uniform(shape=(B, 1, 20, 150)) < 0.4
    seen = seen | (mx.arange(150) == mx.arange(130, 150)[:, None])
    window = mx.abs(mx.arange(150) - mx.arange(130, 150)[:, None]) < 40
    for mask in (seen, seen[:1], window):
        ours, wanted = (ops.attend_heads(q, keys, values, 0.2, mask) for ops in (native, reference))
        assert close(ours, wanted)


def test_rotation_of_heads_matches_the_reference() -> None:
    x = heads(7, 7)[0]
    periods = mx.array([1.0, 3, 9, 27, 81, 90, 91, 92])
    for rope in (Rope(DK, 1e4 ** mx.linspace(0, 0.9, DK // 2)), Rope(16, periods), Rope(16, periods, amplitude=1.3)):
        ours, wanted = (ops.rotate_heads(x, rope, 5) for ops in (native, reference))
        assert close(ours, wanted)
        assert mx.array_equal(native.rotate_heads(x[:, :, 4:], rope, 9), ours[:, :, 4:])


def test_attention_calls_without_a_kernel_run_on_stock_mlx() -> None:
    """Scores that are added, masks that differ by head, and values of another size."""
    q, keys, values = heads(4, 10)
    added = mx.random.normal((4, 10))
    by_head = mx.ones((1, 4, 4, 10), mx.bool_)
    for mask, v in ((added, values), (by_head, values), ("causal", values[..., :16])):
        ours, wanted = (ops.attend_heads(q, keys, v, 0.2, mask) for ops in (native, reference))
        assert mx.array_equal(ours, wanted)


def unconvolved_mixer(kind: str) -> MixerSpec:
    """Return a mixer without a convolution: channels that no register holds whole, or heads of RWKV-7."""
    if kind == "shift":
        return MixerSpec(MixerSizes("shift", 6, 0, 0, 83, width=2), taps=mx.random.uniform(shape=(6, 83)))
    if kind == "scan":
        sizes = MixerSizes("scan", heads=83, key_heads=1, key_dim=20, value_dim=1, width=1)
        return MixerSpec(sizes, rate=-mx.random.uniform(0.1, 2.0, (83, 20)), skip=mx.random.normal((83,)))
    sizes = MixerSizes("wkv", HV, HV, DK, DK, width=1)
    vectors = WkvVectors(*(mx.random.normal((HV, DK)) for _ in WkvVectors._fields))
    return MixerSpec(sizes, wkv=vectors, norm_eps=1e-3)


def mixer(kind: str, *, norm: str | None = "head") -> MixerSpec:
    mx.random.seed(3)
    if kind in ("scan", "wkv", "shift"):
        return replace(unconvolved_mixer(kind), mixes_values=norm == "values")
    heads, key_heads, dim, rows = (1, 0, 0, 83) if kind == "conv" else (HV, HK, DK, DV)
    sizes = MixerSizes(kind, heads, key_heads, dim, rows, 4)
    convolution = mx.random.normal((4, sizes.channels)), mx.random.normal((sizes.channels,))
    if kind == "conv":
        return MixerSpec(sizes, *convolution, gated=norm is None, silu=norm == "silu")
    norms = {"head": mx.random.normal((DV,)), "all": mx.random.normal((HV * DV,)), None: None}
    norms |= {"heads apart": mx.random.normal((HV, DV)), "parts": mx.random.normal((HK, HV // HK * DV))}
    return MixerSpec(
        sizes,
        *convolution,
        rate=-mx.random.uniform(0.1, 2.0, (HV,)),
        step_bias=mx.random.normal((sizes.decays,)),
        most_beta=2.0,
        steps=(0.3, 0.9),
        skip=mx.random.normal((HV,)) if kind == "ssm" else None,
        norm=norms[norm],
        norm_first=kind != "ssm",
        norm_eps=1e-3,
    )


def mixer_inputs(spec: MixerSpec, tokens: int) -> mx.array:
    sizes = spec.sizes
    gates = sizes.inner + (0 if sizes.kind == "ssm" else sizes.heads) + sizes.decays
    projected = {
        "conv": (3 if spec.gated else 1) * sizes.inner,
        "scan": 3 * sizes.heads + 2 * sizes.key_dim,
        "wkv": (8 if spec.mixes_values else 6) * sizes.inner,
        "shift": sizes.value_dim,
    }
    return mx.random.normal((1, tokens, projected.get(sizes.kind, sizes.channels + gates)))


MIXERS = [("delta", "head"), ("kda", "head"), ("ssm", "all"), ("ssm", "parts"), ("ssm", "heads apart")]
MIXERS += [("ssm", None), ("conv", None), ("conv", "ungated"), ("conv", "silu")]
MIXERS += [("scan", None), ("wkv", None), ("wkv", "values"), ("shift", None)]


@pytest.mark.parametrize(("kind", "norm"), MIXERS)
def test_mixers_match_the_reference(kind: str, norm: str | None) -> None:
    spec = mixer(kind, norm=norm)
    counts = [3, 1, 70]
    x = mixer_inputs(spec, sum(counts))
    states = [mx.random.normal((spec.sizes.state,)) for _ in counts]
    wanted, ours = (ops.mix_pass(x, states, counts, spec) for ops in (reference, native))
    assert close(ours[0], wanted[0])
    assert all(close(*pair) for pair in zip(ours[1], wanted[1], strict=True))


def test_a_zero_removed_key_leaves_the_rwkv_state_finite() -> None:
    """The state of RWKV-7 then only decays and grows by the added key, and nothing is divided by zero."""
    spec = unconvolved_mixer("wkv")
    assert spec.wkv is not None
    spec = replace(spec, wkv=spec.wkv._replace(removed_key=mx.zeros((HV, DK))))
    x = mixer_inputs(spec, 5)
    state = mx.random.normal((spec.sizes.state,))
    wanted, ours = (ops.mix_pass(x, [state], [5], spec) for ops in (reference, native))
    assert close(ours[0], wanted[0])
    assert close(ours[1][0], wanted[1][0])


def test_a_scan_with_large_steps_forgets_its_state() -> None:
    """Decays below the smallest float are 0, and steps are the logits themselves."""
    spec = unconvolved_mixer("scan")
    channels = spec.sizes.heads
    x = mx.concatenate([mx.ones((1, 1, 2 * channels)), mx.full((1, 1, channels), 2e3), mx.ones((1, 1, 40))], axis=-1)
    old = mx.random.normal((spec.sizes.state,)) * 1e3
    y, [state] = native.mix_pass(x, [old], [1], spec)
    assert mx.array_equal(state, mx.full(state.shape, 2e3))
    wanted, _ = reference.mix_pass(x, [old], [1], spec)
    assert close(y, wanted)


def test_mixers_without_a_convolution_refuse_wrong_shapes() -> None:
    for kind in ("scan", "wkv", "shift"):
        spec = unconvolved_mixer(kind)
        x = mixer_inputs(spec, 3)
        state = mx.zeros((spec.sizes.state,))
        odd = replace(spec.sizes, key_heads=2)
        other_vectors = None if kind == "wkv" else unconvolved_mixer("wkv").wkv
        for broken in (
            replace(spec, taps=mx.ones((1, spec.sizes.channels))),
            replace(spec, rate=mx.ones((spec.sizes.heads,))),
            replace(spec, norm=mx.ones((spec.sizes.inner,))),
            replace(spec, sizes=odd),
            replace(spec, wkv=other_vectors),
        ):
            with pytest.raises(ValueError, match=r"scan|RWKV-7|shift|mixer"):
                native.mix_pass(x, [state], [3], broken)


@pytest.mark.parametrize("kind", ["scan", "shift", "conv"])
def test_values_mixed_in_other_mixers_than_rwkv_are_refused(kind: str) -> None:
    spec = replace(mixer(kind), mixes_values=True)
    with pytest.raises(ValueError, match="only RWKV-7 mixes values"):
        native.mix_pass(mixer_inputs(spec, 3), [mx.zeros((spec.sizes.state,))], [3], spec)


@pytest.mark.parametrize("bound", [5.0, 0.01, 300.0])
def test_bounded_decays_match_the_reference(bound: float) -> None:
    spec = replace(mixer("kda", norm="head"), bound=bound)
    x = mixer_inputs(spec, 12) * 3
    state = mx.random.normal((spec.sizes.state,))
    wanted, ours = (ops.mix_pass(x, [state], [12], spec) for ops in (reference, native))
    assert close(ours[0], wanted[0])
    assert close(ours[1][0], wanted[1][0])
    _, [unbounded] = native.mix_pass(x, [state], [12], replace(spec, bound=0.0))
    assert not close(ours[1][0], unbounded)


@pytest.mark.sampled
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("kind", "norm"), MIXERS)
def test_a_mixers_token_has_the_same_bits_in_any_pass(kind: str, norm: str | None, threads: int) -> None:
    spec = mixer(kind, norm=norm)
    x = mixer_inputs(spec, 40)
    state = mx.random.normal((spec.sizes.state,))
    native.set_threads(2)
    whole, [end] = native.mix_pass(x, [state], [40], spec)
    native.set_threads(threads)
    parts = []
    for first, last in ((0, 1), (1, 3), (3, 36), (36, 40)):
        beside = mixer_inputs(spec, 2)
        y, [_, state] = native.mix_pass(
            mx.concatenate([beside, x[:, first:last]], axis=1), [mx.zeros_like(state), state], [2, last - first], spec
        )
        parts.append(y[:, 2:])
    assert mx.array_equal(mx.concatenate(parts, axis=1), whole)
    assert mx.array_equal(state, end)
