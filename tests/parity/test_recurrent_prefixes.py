"""Prefix reuse, rollback and the disk store of decoders with recurrent state: the same tokens as from the beginning."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.kv.backend import KVOptions, PassRow, one_pass
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.kv.paged import BlockTable
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.ops import BLOCK, native
from tests.support.mlx_lm_models import VOCAB, config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder
from tests.support.watched import split

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(150)]  # two blocks
NAMES = [
    "qwen3.5", "lfm2", "granite-hybrid", "qwen3-next", "lfm2-moe", "granite-hybrid-moe", "falcon-h1", "nemotron-h",
    "olmo-hybrid", "kimi-linear", "kimi-k3", "mamba2", "mamba", "mamba-normed", "rwkv7",
]  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = write_mlx_lm_model(tmp_path_factory.mktemp("model"), {**config_of(request.param), "vocab_size": VOCAB})
    return load_decoder(directory, native)


def said(engine: Engine, prompt: list[int], steps: int = 6) -> tuple[list[int], int]:
    tokens, end = split(list(engine.generate(Request(prompt, max_tokens=steps, speculate="off"))))
    return tokens, end.summary.reused_tokens


@pytest.mark.sampled
def test_turns_prefill_new_tokens_only(network: Any) -> None:
    chat, once = (Engine(network, context_limit=400, keep_prefix=keep) for keep in (True, False))
    first, reused = said(chat, PROMPT)
    assert reused == 0
    second = [*PROMPT, *first, 3, 1, 4]
    assert said(chat, second) == (
        said(once, second)[0],
        len(second) - 4,
    )  # all but the last answer's end and what is new
    reopened = [*PROMPT[:-9], 8, 8, 8]  # behind the mark before the prompt's end
    tokens, reused = said(chat, reopened)
    assert tokens == said(once, reopened)[0]
    assert BLOCK < reused < len(PROMPT)
    edited = [*PROMPT[:40], 9, *PROMPT[41:]]
    tokens, reused = said(chat, edited)
    assert tokens == said(once, edited)[0]
    # The state at the end of the first chunk goes with its blocks, which later entries needed.
    pool = chat.kv.pool
    assert isinstance(pool, BlockPool)
    if pool.groups:
        assert reused == 0
    else:
        assert reused <= 40


@pytest.mark.sampled
def test_sequences_share_a_running_ones_prefix(network: Any) -> None:
    alone = Engine(network, context_limit=400)
    prompts = [[*PROMPT, 5, 6], [*PROMPT, 7, 8, 9]]
    expected = [said(alone, prompt)[0] for prompt in prompts]
    together = Engine(network, context_limit=400)
    sequences = [together.submit(Request(prompt, max_tokens=6, speculate="off")) for prompt in prompts]
    events: dict[Any, list[Any]] = {sequence: [] for sequence in sequences}
    while together.has_work:
        for sequence, event in together.step():
            events[sequence].append(event)
    assert [split(events[sequence])[0] for sequence in sequences] == expected


def test_rows_have_the_same_bits_together_and_alone(network: Any) -> None:
    kv = network.kv_backend(KVOptions(400))

    def logits(caches: list[Any], tokens: list[list[int]], phase: Any) -> list[mx.array]:
        rows = [PassRow(cache, len(own), phase) for cache, own in zip(caches, tokens, strict=True)]
        [kv_pass] = kv.make_passes(rows)
        ids = [token for own in tokens for token in own]
        x = network.all_logits(network.layers(network.embed(mx.array([ids])), kv_pass))
        kv_pass.advance()
        mx.eval(x, kv_pass.arrays)
        for cache, own in zip(caches, tokens, strict=True):
            cache.commit(len(own))
        return mx.split(x, [len(tokens[0])], axis=1) if len(tokens) == 2 else [x]

    prompts = [PROMPT[:37], PROMPT[40:43]]
    together, *alone = ([kv.acquire(()) for _ in range(2)], *([kv.acquire(())] for _ in range(2)))
    for tokens, phase in ((prompts, "prefill"), ([[5], [7]], "decode"), ([[6, 1, 2], [9]], "decode")):
        both = logits(together, tokens, phase)
        for one, own, expected in zip(alone, tokens, both, strict=True):
            assert mx.array_equal(logits(one, [own], phase)[0], expected)


def test_a_rollback_leaves_the_state_of_the_tokens_before(network: Any) -> None:
    kv = network.kv_backend(KVOptions(400))

    def logits(cache: Any, tokens: list[int], phase: Any) -> mx.array:
        kv_pass = one_pass(kv, cache, len(tokens), phase)
        x = network.all_logits(network.layers(network.embed(mx.array([tokens])), kv_pass))
        kv_pass.advance()
        mx.eval(x, kv_pass.arrays)
        return x

    caches = [kv.acquire(()) for _ in range(2)]
    for cache in caches:
        logits(cache, PROMPT[:30], "prefill")
        cache.commit(30)
    logits(caches[0], PROMPT[30:35], "decode")
    caches[0].commit(2)
    caches[0].rollback()
    for token in PROMPT[30:32]:
        logits(caches[1], [token], "decode")
        caches[1].commit(1)
    ours, theirs = (logits(cache, [PROMPT[32]], "decode") for cache in caches)
    assert mx.array_equal(ours, theirs)
    assert all(mx.array_equal(*pair) for pair in zip(caches[0].states, caches[1].states, strict=True))


@pytest.mark.sampled
def test_a_conversation_continues_from_disk(network: Any, tmp_path: Path) -> None:
    engine = Engine(network, context_limit=400, keep_prefix=True)
    first, _ = said(engine, PROMPT)
    store = DiskStore(tmp_path, 1 << 30)
    history = [*PROMPT, *first]
    engine.kv.store(history[:-1], store, lambda: False)
    second = [*history, 3, 1, 4]
    again = Engine(network, context_limit=400, keep_prefix=True)
    again.kv.load(second, store)
    assert said(again, second) == (said(Engine(network, context_limit=400), second)[0], len(history) - 1)


@pytest.mark.sampled
def test_old_states_are_dropped(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runtime.kv.pool.MOST_STATE_BYTES", network.kv_shape.state_bytes)
    engine = Engine(network, context_limit=400, keep_prefix=True)
    first, _ = said(engine, PROMPT)
    pool = engine.kv.pool
    assert isinstance(pool, BlockPool)
    assert said(engine, [*PROMPT, *first, 2])[1] == len(PROMPT) + len(first) - 1  # the newest one is left
    assert said(engine, [*PROMPT[:-9], 8, 8])[1] == 0


def test_bytes_of_a_cache_include_its_recurrent_state(network: Any) -> None:
    kv = network.kv_backend(KVOptions(400))
    cache = kv.acquire(())
    assert cache.committed_bytes == 0
    _prefill(network, kv, cache, PROMPT[:30])
    assert cache.committed_bytes == network.cost.kv_bytes(30)
    assert cache.allocated_bytes >= cache.committed_bytes


def test_a_pool_without_blocks_keeps_no_more_nodes_than_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network without attention: nodes go with their states, and what a sequence still has is cached anew."""
    network: Any = load_decoder(write_mlx_lm_model(tmp_path, config_of("mamba2")), native)
    monkeypatch.setattr("headrace.runtime.kv.pool.MOST_STATE_BYTES", network.kv_shape.state_bytes)
    engine = Engine(network, context_limit=400, keep_prefix=True)
    pool = engine.kv.pool
    assert isinstance(pool, BlockPool)
    assert pool.groups == []
    for start in range(4):
        prompt = [start, *PROMPT]
        first, _ = said(engine, prompt)
        assert _nodes(pool) <= 2  # of the newest state: a whole block, and a part of one
        second = [*prompt, *first, 2]
        answer, reused = said(engine, second)
        assert reused == len(prompt) + len(first) - 1
    engine.kv.trim()
    assert said(engine, [*second, *answer, 2])[1] == len(second) + len(answer) - 1
    table = engine.kv.acquire([])
    other = engine.kv.acquire([])
    assert isinstance(table, BlockTable)
    assert isinstance(other, BlockTable)
    for cache, token in ((table, 1), (other, 2), (table, 1)):
        _prefill(network, engine.kv, cache, [token] * BLOCK)
        assert cache.cache_blocks([token] * cache.length) is not None


def _prefill(network: Any, kv: Any, cache: Any, tokens: list[int]) -> None:
    kv_pass = one_pass(kv, cache, len(tokens))
    network.layers(network.embed(mx.array([tokens])), kv_pass)
    kv_pass.advance()
    mx.eval(kv_pass.arrays)
    cache.commit(len(tokens))


def _nodes(pool: BlockPool) -> int:
    nodes = [pool.index.root]
    for node in nodes:
        nodes += node.children.values()
    return len(nodes) - 1
