"""Mixture of experts on the native kernels against the MLX reference, on every instruction set of this machine.

The router is plain, so that both choose the same experts. Activations for 2-, 4-, 5-, 6- or 8-bit weights are rounded
to 16 bits: two products in a row give up to 5e-4 of the largest output; the order of additions gives 2e-5.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import LatentExperts, Mixture, Weight, native, reference
from headrace.runtime.routing import Routing
from tests.support.kernels import INSTRUCTION_SETS, Exact, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

EXPERTS = 5
ACTIVE = 2
EPS = 1e-5


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    native.set_threads(0)


def floats(m: Mixture, mode: str) -> Mixture:
    """Return the same shapes in another mode."""
    bits, group = FLOAT_MODES[mode]

    def quantized(stack: Weight) -> Weight:
        data, scales = mx.quantize(stack.data, group_size=group, bits=bits, mode=mode)
        return Weight(data, scales, None, bits, group, stack.bias, mode)

    return replace(m, gate=quantized(m.gate), up=quantized(m.up), down=quantized(m.down))


def stack(rows: int, columns: int, bits: int, group: int = 32, bias: bool = True) -> Weight:
    """Return a random stack of EXPERTS matrices (rows, columns). bits: 0 for a plain one."""
    plain = mx.random.normal((EXPERTS, rows, columns)) * columns**-0.5
    extra = mx.random.normal((EXPERTS, rows)) if bias else None
    if bits == 0:
        return Weight(plain, bias=extra)
    return Weight(*mx.quantize(plain, group_size=group, bits=bits), bits, group, extra)


def mixture(bits: int, width: int = 96, size: int = 160, **changes: Any) -> Mixture:
    """Return a random mixture of a model `width` wide.

    size: inner width of an expert.
    changes: of its fields and of its routing's.
    """
    mx.random.seed(bits + size)
    routing = Routing(EXPERTS, ACTIVE, normalized=True)
    made = Mixture(
        routing=routing,
        router=Weight(mx.random.normal((EXPERTS, width))),
        gate=stack(size, width, bits),
        up=stack(size, width, bits),
        down=stack(width, size, bits if size % 32 == 0 else 0),
    )
    of_routing = {name: changes.pop(name) for name in Routing.__struct_fields__ if name in changes}
    return replace(made, routing=replace(routing, **of_routing), **changes)


def held(m: Mixture, ops: Any) -> Mixture:
    """Return the mixture with its weights as `ops` keeps them."""
    names = [name for name in ("router", "gate", "up", "down") if getattr(m, name) is not None]
    parts = {name: ops.prepare(getattr(m, name), mx.float32) for name in names}
    return replace(m, **parts)


def answers(m: Mixture, x: mx.array, ops: Any = native, activation: str = "silu") -> mx.array:
    """Return the output for x (B, T, E), after a norm."""
    norm = mx.linspace(0.5, 1.5, x.shape[-1])
    return ops.experts(x, norm, EPS, held(m, ops), activation)


def difference(m: Mixture, tokens: int, ops: Any = native, activation: str = "silu") -> float:
    """Return the largest difference from the reference, relative to its largest output, without the residual."""
    x = mx.random.normal((1, tokens, m.router.columns))
    expected = answers(m, x, reference, activation) - x
    return float((mx.abs(answers(m, x, ops, activation) - x - expected).max() / mx.abs(expected).max()).item())


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 2, 9, 80])
@pytest.mark.parametrize("bits", [0, 2, 3, 4, 5, 6, 8])
def test_outputs_match_the_reference(bits: int, tokens: int) -> None:
    assert difference(mixture(bits), tokens) < (5e-4 if bits in (2, 4, 5, 6, 8) else 2e-5)
    assert difference(mixture(bits), tokens, Exact()) < 2e-5


@pytest.mark.parametrize("tokens", [1, 9, 80])
@pytest.mark.parametrize("bits", [0, 4])
def test_experts_without_a_gate_match_the_reference(bits: int, tokens: int) -> None:
    m = mixture(bits, gate=None)
    assert difference(m, tokens, activation="relu2") < (5e-4 if bits else 2e-5)
    assert difference(m, tokens, Exact(), activation="relu2") < 2e-5


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 9, 80])
@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_experts_of_quantized_floats_match_the_reference(mode: str, tokens: int) -> None:
    m = floats(mixture(0), mode)
    assert difference(m, tokens, activation="clamped") < (2e-5 if mode == "mxfp8" else 5e-4)
    assert difference(m, tokens, Exact(), activation="clamped") < 2e-5


@pytest.mark.parametrize("size", [32, 64, 352])
def test_experts_of_any_size_and_routing_match_the_reference(size: int) -> None:
    for m in (mixture(4, 64, size), mixture(4, 64, size, normalized=False), mixture(4, 64, size, active=EXPERTS)):
        assert difference(m, 3) < 5e-4
        assert difference(m, 1, activation="gelu") < 5e-4


@pytest.mark.parametrize("tokens", [1, 5])
def test_router_norms_and_expert_scales_match_the_reference(tokens: int) -> None:
    norm = mx.random.uniform(0.1, 3, (64,))
    scale = mx.random.uniform(0.5, 2, (EXPERTS,))
    m = mixture(4, 64, 96, router_norm=norm, expert_scale=scale)
    assert difference(m, tokens) < 5e-4
    assert difference(replace(m, residual=False), tokens) < 5e-4
    x = mx.random.normal((1, tokens, 64))
    alone = answers(replace(m, residual=False), x)
    assert mx.abs(answers(m, x) - x - alone).max() < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 5, 80])
@pytest.mark.parametrize("bits", [0, 4])
def test_router_weights_can_multiply_the_experts_input(bits: int, tokens: int) -> None:
    """They multiply the experts' input; for one expert a token, and for several."""
    for active in (1, 3):
        m = mixture(bits, active=active, normalized=False, sigmoid=True, shares_first=True)
        assert difference(m, tokens) < (5e-4 if bits else 2e-5)
        assert difference(m, tokens, Exact()) < 2e-5
    x = mx.random.normal((1, tokens, m.router.columns))
    after = answers(replace(m, routing=replace(m.routing, shares_first=False)), x, reference)
    assert mx.abs(answers(m, x, reference) - after).max() > 1e-3


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 5, 80])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_experts_between_two_projections_match_the_reference(tokens: int, has_norm: bool, residual: bool) -> None:
    inner = mixture(0, width=64)
    router = Weight(mx.random.normal((EXPERTS, 96)))
    projections = [Weight(mx.random.normal(shape)) for shape in ((64, 96), (96, 64))]
    x = mx.random.normal((1, tokens, 96))

    def output(ops: Any) -> mx.array:
        into, out = (ops.prepare(weight, mx.float32) for weight in projections)
        latent = LatentExperts(into, out, mx.linspace(0.5, 1.5, 64) if has_norm else None, EPS)
        return answers(replace(inner, router=router, latent=latent, residual=residual), x, ops)

    expected = output(reference)
    assert mx.abs(output(Exact()) - expected).max().item() < 2e-5 * mx.abs(expected).max().item()


@pytest.mark.parametrize("size", [24, 41])
def test_sizes_that_fill_no_whole_band_match_the_reference(size: int) -> None:
    m = mixture(4, 64, size)
    assert difference(m, 1) < 5e-4
    assert difference(m, 7) < 5e-4


def test_experts_may_have_parts_of_different_formats() -> None:
    m = mixture(4, 96, 64, up=stack(64, 96, 8), down=stack(96, 64, 6))
    assert difference(m, 1) < 5e-4
    assert difference(m, 11) < 5e-4


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_near_tied_experts_do_not_flip(tokens: int) -> None:
    """Twins among the experts differ in one column, where an activation is too small for 16-bit groups."""
    data, scales, biases = mx.quantize(mx.random.normal((EXPERTS, 96), key=mx.random.key(2)), 32, 8)
    half = EXPERTS // 2
    for part in (data, scales, biases):
        part[half : 2 * half] = part[:half]
    data[half : 2 * half, 0] = data[:half, 0] ^ 0x80  # the first column's code, by half its range
    router = Weight(data, scales, biases, 8, 32)
    m = mixture(0, 96, 64, router=router, active=1)
    x = mx.random.normal((1, tokens, 96), key=mx.random.key(5))
    for small in (3e-5, -3e-5):
        x[..., 0] = small
        expected = answers(m, x, reference) - x
        norm = mx.linspace(0.5, 1.5, 96)
        exact = replace(held(m, native), router=native.prepare(m.router, mx.float32, exact=True))
        assert mx.allclose(native.experts(x, norm, EPS, exact, "silu") - x, expected, atol=1e-3)


@pytest.mark.sampled
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("router_bits", [0, 8])
@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
def test_a_tokens_output_has_the_same_bits_in_any_batch(bits: int, router_bits: int) -> None:
    plain = mx.random.normal((EXPERTS, 256))
    router = Weight(*mx.quantize(plain, 64, 8), 8, 64) if router_bits else Weight(plain)
    m = held(mixture(bits, 256, 192, router=router), native)
    x = mx.random.normal((1, 70, 256))
    norm = mx.ones(256)
    native.set_threads(1)
    together = native.experts(x, norm, EPS, m, "silu")
    mx.eval(together)
    for count in (1, 2, 3, 7):
        native.set_threads(count)
        assert mx.array_equal(native.experts(x, norm, EPS, m, "silu"), together)
        alone = [native.experts(x[:, i : i + 1], norm, EPS, m, "silu") for i in range(70)]
        assert mx.array_equal(mx.concatenate(alone, axis=1), together)


def test_more_tokens_than_one_tile_match_the_reference() -> None:
    m = held(mixture(4, 64, 32), native)
    x = mx.random.normal((1, 4096, 64))
    whole = native.experts(x, mx.ones(64), EPS, m, "silu")
    parts = [native.experts(part, mx.ones(64), EPS, m, "silu") for part in mx.split(x, 4, axis=1)]
    assert mx.array_equal(whole, mx.concatenate(parts, axis=1))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("bits", [0, 4])
def test_non_finite_values_stay_with_their_token(bits: int, tokens: int) -> None:
    m = held(mixture(bits), native)
    x = mx.random.normal((1, tokens, 96))
    x[0, tokens - 1, 40] = float("nan")
    out = mx.isnan(native.experts(x, mx.ones(96), EPS, m, "silu"))
    assert out.all(axis=-1).tolist() == [[False] * (tokens - 1) + [True]]


def test_inconsistent_shapes_are_refused() -> None:
    m = held(mixture(4), native)
    too_many = replace(m, routing=replace(m.routing, active=EXPERTS + 1))
    with pytest.raises(ValueError, match="no more than there are"):
        native.experts(mx.zeros((1, 1, 96)), mx.ones(96), EPS, too_many, "silu")
    with pytest.raises(ValueError, match="do not fit"):
        native.experts(mx.zeros((1, 1, 96)), mx.ones(96), EPS, replace(m, down=m.up), "silu")
    with pytest.raises(ValueError, match="expert"):
        native.experts(mx.zeros((1, 1, 96)), mx.ones(96), EPS, replace(m, down=mixture(4).down), "silu")


def test_weights_that_are_not_read_yet_are_refused() -> None:
    # The plan would copy their pointers, which are null.
    x = mx.ones((1, 1, 96))
    with native.read_together():
        m = held(mixture(4), native)
        with pytest.raises(ValueError, match="not read yet"):
            native.experts(x, mx.ones(96), EPS, m, "silu")
    assert native.experts(x, mx.ones(96), EPS, m, "silu").shape == x.shape


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_products_with_chosen_matrices_match_the_reference(bits: int) -> None:
    """Few and many rows, one or several matrices for each; a row has the same bits alone, in any order."""
    mx.random.seed(bits)
    weight = stack(160, 96, bits)
    held_stack = native.prepare(weight, mx.float32)
    for rows, active in ((1, 3), (7, 1), (90, 2)):
        x = mx.random.normal((rows, 96))
        indices = mx.random.randint(0, EXPERTS, (rows, active))
        wanted = reference.expert_linear(x, indices, weight, EXPERTS)
        ours = native.expert_linear(x, indices, held_stack, EXPERTS)
        assert mx.abs(ours - wanted).max().item() < 5e-4 * mx.abs(wanted).max().item()
        alone = [native.expert_linear(x[i : i + 1], indices[i : i + 1], held_stack, EXPERTS) for i in range(rows)]
        assert mx.array_equal(mx.concatenate(alone), ours)


def test_products_with_matrices_outside_the_stack_are_nan() -> None:
    weight = native.prepare(stack(32, 64, 4), mx.float32)
    y = native.expert_linear(mx.ones((3, 64)), mx.array([1, EXPERTS, -1]), weight, EXPERTS)
    assert mx.isnan(y).all(axis=-1).tolist() == [False, True, True]
