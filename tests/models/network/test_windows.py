"""Layers that keep only their window say what layers that keep everything say: long after they began to drop rows."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv import slot_cache as caches
from headrace.runtime.ops import Ops, reference
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of, tolerance
from tests.support.tiny import VOCAB, load_decoder, quantize_model, write_model
from tests.support.watched import split

VARIANTS = ["gemma3", "gpt-oss", "mistral-window", "phi3-window", "gemma2-window", "qwen3-window", "llama-layer-types"]
EVERY_EXPERT = {"gpt-oss": {"num_experts_per_tok": 5}}  # so that rounding cannot choose others
TOKENS = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(90)]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def directory(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("windowed"), variant, changes=EVERY_EXPERT.get(variant))


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dropped after a few tokens already."""
    monkeypatch.setattr(caches, "CHUNK", 4)
    monkeypatch.setattr(caches, "ROLLBACK", 3)
    monkeypatch.setattr(caches, "DROPPED", 1)


def feed(network: Decoder, tokens: list[int], chunks: list[int]) -> tuple[mx.array, Any]:
    """Logits (T, V) of `tokens` in chunks of these sizes, the last one repeated; and the cache."""
    cache = new_cache(network, len(tokens))
    done = 0
    logits = []
    sizes = iter(chunks)
    size = chunks[0]
    while done < len(tokens):
        size = next(sizes, size)
        part = tokens[done : done + size]
        cache.reserve(len(part))
        logits.append(network.all_logits(network.layers(network.embed(mx.array([part])), cache))[0])
        cache.advance(len(part))
        mx.eval(logits[-1], cache.arrays)
        cache.commit(len(part))
        done += len(part)
    return mx.concatenate(logits), cache


def difference(a: mx.array, b: mx.array) -> float:
    a = a.astype(mx.float32)
    b = b.astype(mx.float32)
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


CHUNKS = {"ones": [1], "few": [5, 7, 1], "straddling": [13], "long": [40, 30, 1]}


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.usefixtures("tight")
def test_dropped_entries_are_outside_the_window(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    whole, full = feed(network, TOKENS, [len(TOKENS)])
    for name, chunks in CHUNKS.items():
        if ops is reference and len(KERNELS) > 1 and name != "few":
            continue  # the stock operations are slow beside kernels, and have one way of cutting up
        found, cache = feed(network, TOKENS, chunks)
        assert max(full.firsts) == 0 < max(cache.firsts), name
        assert cache.allocated_bytes < full.allocated_bytes, name
        assert difference(found, whole) < tolerance(ops), name


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS[:2], ids=name_of)
@pytest.mark.usefixtures("tight")
def test_turns_edits_and_repeats_leave_output_unchanged(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    chat = Engine(network, context_limit=200, keep_prefix=True)
    fresh = Engine(network, context_limit=200)

    def say(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
        said, end = split(list(engine.generate(Request(prompt, max_tokens=12))))
        return said, end.summary.reused_tokens

    first = TOKENS[:45]
    said, _ = say(chat, first)
    assert said == say(fresh, first)[0]
    second = [*first, *said, 4, 90]
    answer, reused = say(chat, second)
    assert (answer, reused) == (say(fresh, second)[0], reused)
    assert reused >= len(first)
    edited = [*first[:30], 11, 12, *first[30:]]  # further back than the windows reach
    assert say(chat, edited)[0] == say(fresh, edited)[0]
    assert say(chat, edited)[0] == say(fresh, edited)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.usefixtures("tight")
def test_rollback_after_rows_were_dropped(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    whole, _ = feed(network, TOKENS, [len(TOKENS)])
    _, cache = feed(network, TOKENS[:60], [7, 1])
    cache.cache.limit = len(TOKENS) + 10
    assert max(cache.firsts) > 0

    def append(tokens: list[int]) -> mx.array:
        cache.reserve(len(tokens))
        logits = network.all_logits(network.layers(network.embed(mx.array([tokens])), cache))[0]
        cache.advance(len(tokens))
        mx.eval(logits, cache.arrays)
        return logits

    for wrong in ([1, 2, 3], [9] * 20):  # few enough to fit beside the window, and many more
        append(wrong)
        cache.rollback()
    length = 60 - caches.ROLLBACK
    assert cache.reachable(length) == length
    cache.trim(length)
    found = append(TOKENS[length:])
    assert difference(found, whole[length:]) < tolerance(ops)


@pytest.mark.sampled
@pytest.mark.usefixtures("tight")
def test_records_count_visible_and_stored_entries(directory: Path) -> None:
    network = load_decoder(directory)
    events = list(Engine(network, context_limit=200).generate(Request(TOKENS[:70], max_tokens=20)))
    cost = network.cost
    record = [event.record for event in events if isinstance(event, Step)][-1]
    everything = record.context * cost.kv_bytes_per_token
    assert record.kv_bytes_read == cost.kv_bytes_read(record.context - 1)
    assert record.kv_bytes_read <= record.kv_used_bytes < everything
    assert record.kv_used_bytes <= record.kv_allocated_bytes


@pytest.mark.sampled
@pytest.mark.usefixtures("tight")
def test_windowed_caches_drop_rows_in_half_precision(directory: Path, variant: str, tmp_path: Path) -> None:
    dtype = (mx.float16, mx.bfloat16)[VARIANTS.index(variant) % 2]
    if "gpt_oss" in (directory / "config.json").read_text():  # MLX multiplies plain experts in float32 alone
        directory = quantize_model(directory, tmp_path)
    whole, _ = feed(load_decoder(directory), TOKENS, [len(TOKENS)])
    found, cache = feed(load_decoder(directory, reference, dtype), TOKENS, [9, 1])
    assert max(cache.firsts) > 0
    assert {found.dtype, *(array.dtype for array in cache.arrays)} == {dtype}
    assert difference(found, whole) < (2**-6 if dtype == mx.float16 else 2**-3)
