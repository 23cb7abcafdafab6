"""Memory of attention scores in stock MLX: bounded, with the same result."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.runtime.ops import attention
from headrace.runtime.ops.attention import SCORES, sdpa_mask
from headrace.runtime.ops.weights import AttentionSpec

HEADS = 4
KV_HEADS = 2
DIM = 32
QUERIES = 96
ENTRIES = 1024
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, scale=DIM**-0.5)
SPECS = {
    "causal": SPEC,
    "window": replace(SPEC, window=300),
    "narrow window": replace(SPEC, window=9),
    "sinks": replace(SPEC, sinks=mx.linspace(-1, 1, HEADS)),
    "softcap": replace(SPEC, softcap=5.0),
    "chunks": replace(SPEC, window=33, chunked=True),
}


def heads(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries (1, H, T, D), keys and values (1, Hkv, S, D)."""
    mx.random.seed(4)
    q = mx.random.normal((1, HEADS, QUERIES, DIM)).astype(dtype)
    k, v = (mx.random.normal((1, KV_HEADS, ENTRIES, DIM)).astype(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 7, 40, 95])
@pytest.mark.parametrize("kind", SPECS)
def test_attention_in_pieces_equals_attention_at_once(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads()
    whole = attention.attention(q, k, v, SPECS[kind])
    monkeypatch.setitem(SCORES, mx.default_device().type, size * HEADS * ENTRIES * 4)
    pieces = attention.attention(q, k, v, SPECS[kind])
    assert pieces.shape == whole.shape
    assert mx.allclose(pieces, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("kind", SPECS)
def test_attention_scores_stay_within_their_memory_bound(
    kind: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = heads(dtype)
    spec = SPECS[kind]
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks.astype(dtype))
    mx.eval(arrays, spec.sinks)
    bound = QUERIES * HEADS * ENTRIES * dtype.size // 8
    monkeypatch.setitem(SCORES, mx.default_device().type, bound)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attention.attention(*arrays, spec))
    assert mx.get_peak_memory() - before < 4 * bound


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("metal", [True, False], ids=["metal", "cuda"])
def test_a_gpu_runs_fused_attention_for_the_head_sizes_that_have_it(
    dim: int, window: int | None, metal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of many queries, by head size and mask; for few scores MLX's own choice."""
    calls = list[Any]()
    q = mx.zeros((1, HEADS, QUERIES, dim), mx.float16)
    k = v = mx.zeros((1, KV_HEADS, ENTRIES, dim), mx.float16)
    spec = replace(SPEC, head_dim=dim, window=window)
    whole = sdpa_mask(QUERIES, ENTRIES, spec, 0)

    def attend(q: mx.array, _k: mx.array, _v: mx.array, *, mask: Any, force_fused: bool = False, **_: Any) -> mx.array:
        assert type(mask) is type(whole) or q.shape[2] < QUERIES
        calls.append((q.shape[2], force_fused))
        return q

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    attention.attention(q, k, v, spec)
    assert calls == [(QUERIES, False)]
    calls.clear()
    monkeypatch.setitem(SCORES, mx.DeviceType.gpu, 32 * HEADS * ENTRIES * 2)
    attention.attention(q, k, v, spec)
    if (dim in (64, 80, 128) and (metal or window is None)) or (dim == 32 and not metal and window is None):
        assert calls == [(QUERIES, False)]
    elif dim in (192, 256) and metal:
        assert calls == [(QUERIES, True)]
    else:
        assert calls == [(32, False)] * 3


@pytest.mark.parametrize(("heads_per_kv", "rows", "sizes"), [
    (1, 1, [1]), (2, 8, [8]), (2, 10, [8, 2]), (8, 10, [4, 4, 2]), (8, 5, [4, 1]), (16, 5, [2, 2, 1]), (2, 33, [33]),
    (32, 5, [5]),
])  # fmt: skip
def test_draft_tokens_attend_by_kernels_for_few_queries(
    heads_per_kv: int, rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal's take 8 queries, and 32 times the query heads of a K/V head; the result is that of all at once."""
    mx.random.seed(2)
    q = mx.random.normal((1, 2 * heads_per_kv, rows, 64))
    k, v = (mx.random.normal((1, 2, 50, 64)) for _ in range(2))
    for window in (None, 20):
        spec = AttentionSpec(2 * heads_per_kv, 2, 64, scale=0.125, window=window)
        whole = attention.attention(q, k, v, spec)
        calls = list[int]()
        with monkeypatch.context() as patched:
            as_on_metal(patched, calls, mx.fast.scaled_dot_product_attention)
            pieces = attention.attention(q, k, v, spec)
        assert calls == sizes
        assert mx.allclose(pieces, whole, rtol=1e-5, atol=1e-6)


def as_on_metal(patched: pytest.MonkeyPatch, calls: list[int], fused: Callable[..., mx.array]) -> None:
    """Count the queries of each attention on what says it is Metal."""

    def attend(q: mx.array, *arguments: Any, **options: Any) -> mx.array:
        calls.append(q.shape[2])
        return fused(q, *arguments, stream=mx.cpu, **options)

    patched.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    patched.setattr(mx.metal, "is_available", lambda: True)
    patched.setattr(mx.fast, "scaled_dot_product_attention", attend)
