"""Packed K/V on stock MLX: attention within what quantization explains, whatever way it takes, and all a cache does."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Finished, Request, Step
from headrace.runtime.ops import AttentionSpec, Rope, packed, reference
from headrace.runtime.ops.kv_format import FLOAT32, FORMATS, K8V4, Q4, Q8, Coding, KVFormat
from tests.support.alone import new_cache
from tests.support.hadamard import hadamard
from tests.support.tiny import load_decoder, write_model
from tests.support.watched import answer

PACKED = [Q8, K8V4, Q4]
PROMPT = [(7 * i * i + 3 * i) % 96 for i in range(300)]
DISTANCE = {Q8: 0.05, K8V4: 0.3, Q4: 0.6}  # of logits on average, relative to their size: weights are random


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name) for name in ("llama", "gemma3", "gpt-oss")}


@pytest.fixture(params=["llama", "gemma3", "gpt-oss"])
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    return directories[request.param]


@pytest.fixture(params=PACKED, ids=lambda kv: kv.name)
def decoder(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Decoder:
    return of_format(directories["gemma3"], request.param)


def of_format(directory: Path, kv: KVFormat) -> Decoder:
    plain = load_decoder(directory, reference)
    return plain.with_kv(reference.packed_format(kv, plain.kv_shape.head_dim))


def new_rows(coding: Coding, kv_heads: int, entries: int, head_dim: int) -> packed.PackedRows:
    return packed.pack(mx.zeros((1, kv_heads, entries, head_dim)), coding, mx.float16)


def step(coding: Coding, largest: float) -> float:
    """The most that a code is from the next; of few bits MLX moves steps so that one of them is 0."""
    return 2 * largest / 255 * 1.01 if coding.bits == 8 else 2 * 2 * largest / (2**coding.bits - 1)


@settings(max_examples=40, deadline=None)
@given(
    kv=st.sampled_from(PACKED),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 5),
    past=st.integers(0, 90),
    count=st.sampled_from([1, 2, 5, 30, 80]),
    kind=st.sampled_from(["plain", "window", "softcap", "sinks"]),
    seed=st.integers(0, 1000),
)
def test_packed_attention_equals_attention_over_the_dequantized_codes(
    kv: KVFormat, head_dim: int, kv_heads: int, shared: int, past: int, count: int, kind: str, seed: int
) -> None:
    heads = kv_heads * shared
    kv = reference.packed_format(kv, head_dim)
    spec = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        0.02,
        None,
        window=20 if kind == "window" else None,
        softcap=5.0 if kind == "softcap" else None,
        sinks=mx.linspace(-1, 1, heads) if kind == "sinks" else None,
    )
    length = past + count
    qkv = mx.random.uniform(-1, 1, (1, length, (heads + 2 * kv_heads) * head_dim), key=mx.random.key(seed))
    keys, values = (new_rows(coding, kv_heads, length + 3, head_dim) for coding in (kv.keys, kv.values))
    done = 0
    for rows in (past, count):
        if rows:
            out, keys, values = packed.attend([qkv[:, done : done + rows]], keys, values, done, spec, 0, kv)
            done += rows
    each = np.array(qkv[0], np.float64).reshape(length, heads + 2 * kv_heads, head_dim).swapaxes(0, 1)
    q, k, v = np.split(each, [heads, heads + kv_heads])
    seen = []
    for rows, plain, coding in ((keys, k, kv.keys), (values, v, kv.values)):
        exact = packed.PackedRows(rows.codes, rows.scales.astype(mx.float32), rows.offsets.astype(mx.float32))
        codes = np.array(packed._unpacked(exact, coding, mx.float32)[0, :, :length], np.float64)
        stored = plain @ hadamard(head_dim)
        assert (
            np.abs(codes - stored).max() <= step(coding, float(np.abs(stored).max())) + 2e-3
        )  # MLX moves groups so that a code is 0
        seen.append(codes @ hadamard(head_dim))
    expected = attention_in_doubles(q[:, past:], *seen, spec)
    assert np.abs(np.array(out[0]) - expected).max() < 2e-3  # unpacked in half precision


def attention_in_doubles(
    q: NDArray[np.float64], keys: NDArray[np.float64], values: NDArray[np.float64], spec: AttentionSpec
) -> NDArray[np.float64]:
    """Attend with the last queries (H, T, D) over keys and values (Hkv, S, D) -> (T, H * D)."""
    shared = spec.heads // spec.kv_heads
    count = q.shape[1]
    entries = keys.shape[1]
    scores = q @ keys.repeat(shared, axis=0).swapaxes(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = np.tanh(scores / spec.softcap) * spec.softcap
    position = np.arange(entries - count, entries)[:, None]
    distance = position - np.arange(entries)
    hidden = (distance < 0) | (distance >= (spec.window or entries))
    weights = np.exp(np.where(hidden, -np.inf, scores))
    total = weights.sum(axis=-1, keepdims=True)
    if spec.sinks is not None:
        total += np.exp(np.array(spec.sinks, np.float64))[:, None, None]
    out = weights / total @ values.repeat(shared, axis=0)
    return out.swapaxes(0, 1).reshape(count, -1)


@pytest.mark.parametrize("count", [1, 70], ids=["codes", "unpacked"])
@pytest.mark.parametrize("spoiled", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("kv", PACKED, ids=lambda kv: kv.name)
def test_non_finite_values_are_not_hidden(kv: KVFormat, spoiled: int, count: int) -> None:
    kv = reference.packed_format(kv, 32)
    spec = AttentionSpec(1, 1, 32, 0.2, Rope(32, mx.ones(16)))
    qkv = mx.random.normal((1, count, 3 * 32))
    qkv[0, -1, 32 * spoiled + 5] = float("nan")
    rows = [new_rows(coding, 1, count, 32) for coding in (kv.keys, kv.values)]
    out, *_ = packed.attend([qkv], rows[0], rows[1], 0, spec, 0, kv)
    assert not mx.isfinite(out[0, -1]).any().item()


def test_large_keys_in_half_precision_stay_finite() -> None:
    coding = reference.packed_format(Q8, 64).keys
    rows = packed.pack(mx.full((1, 1, 1, 64), 3000, mx.float16), coding, mx.float16)  # 64 of them have no sum in it
    assert mx.isfinite(rows.scales).all().item()


@pytest.mark.sampled
@pytest.mark.parametrize("kv", PACKED, ids=lambda kv: kv.name)
def test_output_is_close_to_full_precision(directory: Path, kv: KVFormat) -> None:
    exact = load_decoder(directory, reference, kv=FLOAT32)
    logits = []
    for network in (exact, of_format(directory, kv)):
        cache = new_cache(network, len(PROMPT))
        rows = []
        for part in (PROMPT[:200], PROMPT[200:-1], PROMPT[-1:]):
            cache.reserve(len(part))
            rows.append(network.all_logits(network.layers(network.embed(mx.array([part])), cache)))
            cache.advance(len(part))
            cache.commit(len(part))
        logits.append(mx.concatenate(rows, axis=1))
    far = mx.abs(logits[1] - logits[0]).mean() / mx.abs(logits[0]).mean()
    assert float(far) < DISTANCE[kv]


def test_counted_bytes_equal_those_of_the_arrays(decoder: Decoder) -> None:
    cache = new_cache(decoder, 2000)
    cache.reserve(700)
    assert cache.allocated_bytes == sum(array.nbytes for array in cache.arrays)
    assert decoder.cost.kv_bytes(1) == sum(array.nbytes // array.shape[2] for array in cache.arrays)


@pytest.mark.sampled
def test_batching_and_draft_tokens_do_not_change_output(decoder: Decoder) -> None:
    prompts = [PROMPT[:40], [5, 6, 7] * 12]
    alone = [answer(decoder, Request(prompt, max_tokens=24, speculate="off"))[0] for prompt in prompts]
    engine = Engine(decoder, context_limit=256)
    sequences = [engine.submit(Request(prompt, max_tokens=24)) for prompt in prompts]
    said: dict[int, list[int]] = {id(sequence): [] for sequence in sequences}
    while engine.has_work:
        for sequence, event in engine.step():
            if isinstance(event, Step):
                said[id(sequence)] += event.tokens
            elif isinstance(event, Finished):
                assert event.reason == "length"
    assert list(said.values()) == alone


def test_formats_take_their_stated_bytes() -> None:
    """Shares of f16, with heads of a multiple of 64; scales are in half precision."""
    shares = [
        float(reference.packed_format(kv, 64).bytes_per_value / FORMATS[0].bytes_per_value) for kv in (Q8, K8V4, Q4)
    ]
    assert all(share <= most for share, most in zip(shares, (0.56, 0.45, 0.35), strict=True))
