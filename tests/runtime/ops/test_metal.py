"""Metal kernels against their stock twins: on a Mac by Metal, elsewhere compiled for the CPU (`tests.metal`)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime import ops
from headrace.runtime.ops import attention, metal, metal_check, reference
from headrace.runtime.ops.weights import AttentionSpec
from tests.bench.graph_counts import FAMILIES, OTHERS, model_of
from tests.metal import emulator
from tests.metal.emulator import emulated
from tests.support.alone import new_cache
from tests.support.tiny import load_decoder

HALVES = [mx.float16, mx.bfloat16]
_emulates = pytest.mark.skipif(not emulator.AVAILABLE, reason="needs g++, and no Metal")


@pytest.mark.skipif(not mx.metal.is_available(), reason="needs Metal")
def test_metal_runs_the_kernels() -> None:
    assert metal.status.__wrapped__() == metal.MetalStatus(True)


def test_stock_operations_run_where_a_metal_kernel_differs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> str:
        raise RuntimeError("[metal] does not compile\nline 7")

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    for check, reason in ((lambda: "add_norms differs", "add_norms differs"), (breaks, "[metal] does not compile")):
        monkeypatch.setattr(metal, "checks", [check])
        assert metal.status.__wrapped__() == metal.MetalStatus(False, reason)
    monkeypatch.setattr(metal, "checks", [lambda: ""])
    assert metal.status.__wrapped__() == metal.MetalStatus(True)
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert not metal.status.__wrapped__().available


@pytest.mark.parametrize(
    ("status", "kernels", "reason"),
    [
        (metal.MetalStatus(True), "metal", "Metal kernels"),
        (metal.MetalStatus(False, "add_norms differs"), "reference", "differs"),
    ],
)
def test_the_metal_kernels_in_use_and_the_reason_are_reported(
    monkeypatch: pytest.MonkeyPatch, status: metal.MetalStatus, kernels: str, reason: str
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(metal, "status", lambda: status)
    described = ops.describe()
    assert described["kernels"] == kernels
    assert reason in described["reason"]
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert ops.describe() == {"kernels": "reference", "reason": "HEADRACE_KERNELS=reference"}


@pytest.mark.sampled
@_emulates
@pytest.mark.parametrize("dtype", [*HALVES, mx.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (2, 576), (1, 4096), (1, 5376), (1, 16384)])
def test_sums_and_norms_match_stock_operations(rows: int, width: int, dtype: mx.Dtype) -> None:
    x, residual = (_random((1, rows, width), dtype, seed) for seed in (1, 2))
    post = _random((width,), dtype, 3)
    norm = _random((width,), dtype, 4)
    scalar = _random((1,), dtype, 5)
    for before, behind, scale in ((None, norm, None), (post, norm, scalar), (post, None, None)):
        with emulated() as names:
            found = metal.add_norms(x, residual, before, behind, 1e-5, scale)
        assert len(names) == 1
        expected = metal.add_norms_twin(x, residual, before, behind, 1e-5, scale)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                _assert_alike(one, other)


def _every_spec() -> Iterator[AttentionSpec]:
    for spec in metal_check.specs(mx.float16):
        yield spec
        yield replace(spec, projects="qk", v_norm=True)
        yield replace(spec, projects="q", k_norm=None)


@pytest.mark.sampled(24)
@_emulates
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("spec", list(_every_spec()))
def test_head_operations_match_stock_operations(spec: AttentionSpec, dtype: mx.Dtype) -> None:
    """Projections stacked or apart, of one sequence or of several at positions of their own."""
    q_norm, k_norm = (norm if norm is None else norm.astype(dtype) for norm in (spec.q_norm, spec.k_norm))
    spec = replace(spec, q_norm=q_norm, k_norm=k_norm)
    heads = [spec.heads, spec.kv_heads, spec.kv_heads][: len(spec.projects)]
    stacked = _random((3, 2, sum(heads) * spec.head_dim), dtype, 6)
    apart = [_random((3, 2, count * spec.head_dim), dtype, 7 + place) for place, count in enumerate(heads)]
    for qkv, offset in (([stacked[:1]], 1000), (apart, 70), ([stacked], mx.array([5, 0, 90], mx.int32))):
        place = partial(attention.placed_heads, qkv, offset, spec)
        with emulated() as names:
            found = place()
        expected = place()
        assert names or (spec.projects == "q" and spec.q_norm is None)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                _assert_alike(one, other)


@_emulates
def test_partial_rotations_that_split_a_pair_run_stock_operations() -> None:
    spec = next(metal_check.specs(mx.float16))
    assert spec.rope is not None
    half = replace(spec, rope=replace(spec.rope, dims=32, periods=spec.rope.periods[:16]))
    with emulated() as names:
        attention.placed_heads([_random((1, 1, 10 * 128), mx.float16, 1)], 0, half)
    assert not names


@pytest.mark.sampled(24)
@_emulates
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_metal_kernels_give_the_logits_of_stock_operations(family: str, tmp_path: Path) -> None:
    network = load_decoder(model_of(tmp_path, family, 2, mixed=family == "qwen2"), reference, mx.float16)
    with emulated() as names:
        own = _logits(network)
    assert len({name.split("_")[1] for name in names}) == 1 + (family not in ("llama", "glm4"))
    count = len(names)
    with metal.forced(False):
        _assert_alike(own, _logits(network), 1e-2)
    assert len(names) == count


def _logits(network: Decoder) -> mx.array:
    """Return the logits of a prompt and of a step behind it."""
    cache = new_cache(network, 64)
    found = list[mx.array]()
    for tokens in ([5, 17, 3, 88], [7]):
        x = network.layers(network.embed(mx.array([tokens])), cache.reserve(len(tokens)))
        found.append(network.all_logits(x))
        cache.advance()
    return mx.concatenate(found, axis=1)


def test_sources_match_the_golden_file() -> None:
    """The Metal source of every kernel, as MLX generates it. `python -m tests.metal` writes it again."""
    if mx.metal.is_available():
        pytest.skip("MLX prints sources without Metal while it traces alone")
    assert emulator.sources() == emulator.GOLDEN.read_text(encoding="utf-8")


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _assert_alike(one: mx.array, other: mx.array, tolerance: float | None = None) -> None:
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    bound = tolerance or {mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.float32: 2e-6}[one.dtype]
    a = one.astype(mx.float32)
    b = other.astype(mx.float32)
    assert mx.abs(a - b).max() <= bound * mx.abs(b).max()
