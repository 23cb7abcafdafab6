"""Attention over packed K/V in one Metal kernel, compiled for the CPU, against stock MLX in float32."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.runtime.ops import metal, metal_attention, packed, reference
from headrace.runtime.ops.kv_format import K8V4, Q4, Q8, Coding, KVFormat
from headrace.runtime.ops.weights import AttentionSpec
from tests.bench.graph_counts import own_packed_step
from tests.metal import emulator
from tests.metal.emulator import emulated
from tests.support.tiny import quantize_model, write_model

pytestmark = pytest.mark.skipif(not emulator.AVAILABLE, reason="needs g++, and no Metal")
SPECS = {
    "grouped heads": AttentionSpec(6, 2, 128, 0.09),
    "small heads": AttentionSpec(4, 4, 32, 0.2),
    "large heads, softcap": AttentionSpec(2, 1, 256, 0.06, softcap=5.0),
    "sinks": AttentionSpec(8, 1, 64, 0.125, sinks=mx.array([3.0, -2.0, 0.0, 1.0, 5.0, 0.5, -1.0, 2.0])),
    "window": AttentionSpec(2, 2, 64, 0.125, window=9),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("queries", "entries"), [(1, 1), (1, 200), (3, 40)])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("kv", "dtype"), [(Q8, mx.float16), (K8V4, mx.bfloat16), (Q4, mx.float32)])
def test_metal_attention_matches_stock_operations(
    name: str, kv: KVFormat, dtype: mx.Dtype, queries: int, entries: int
) -> None:
    """Buffers have room behind the entries, so that rows are strided."""
    spec = SPECS[name]
    scales = mx.float16 if dtype == mx.float32 else dtype
    kv = reference.packed_format(kv, spec.head_dim)
    begin = 0 if spec.window is None else max(0, entries - queries - spec.window + 1)  # as `packed.attend` cuts them

    def rows(seed: int, coding: Coding) -> packed.PackedRows:
        whole = packed.pack(_random((1, spec.kv_heads, 256, spec.head_dim), seed), coding, scales)
        return packed.PackedRows(*(part[:, :, begin:entries] for part in whole))

    keys = rows(1, kv.keys)
    values = rows(2, kv.values)
    q = _random((1, spec.heads, queries, spec.head_dim), 3).astype(dtype)
    with emulated() as names:
        own = metal_attention.attend(q, keys, values, spec, kv)
    assert len(names) == 1
    expected = packed.over_codes(q.astype(mx.float32), keys, values, spec, kv)
    assert (own.shape, own.dtype) == (expected.shape, dtype)
    bound = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.float32: 2e-5}[dtype]
    assert mx.abs(own.astype(mx.float32) - expected).max() <= bound * mx.abs(expected).max()


def test_steps_on_packed_kv_run_metal_attention(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "qwen3", dtype=mx.float16)
    model = quantize_model(plain, tmp_path / "model")
    with metal.forced(False):
        expected = own_packed_step(model)([7])
        mx.eval(expected)
    with emulated() as names:
        own = own_packed_step(model)([7])
    assert sum("attend_codes" in name for name in names) == 2 * 3  # of three layers: the prompt, a step
    assert mx.abs(own - expected).max() <= 2e-2 * mx.abs(expected).max()


def _random(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
