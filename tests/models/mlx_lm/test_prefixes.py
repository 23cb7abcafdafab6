"""Prefix reuse of mlx-lm's classes: several conversations, batches, and the disk."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.mlx_lm.backend import _pack, _unpack
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prefill import prefill as prefill_chunks
from headrace.runtime.engine.prompt_chunks import OPENING
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.ops import BLOCK
from tests.models.mlx_lm.test_forgetting import FIRST, FORGETFUL, KINDS, LIMIT, WINDOW, Chat, alone
from tests.models.mlx_lm.test_network import load, write

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module", params=KINDS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxLmNetwork:
    return load(write(tmp_path_factory.mktemp("prefixes"), FORGETFUL[request.param]))


def never() -> bool:
    return False


@pytest.mark.sampled
def test_several_conversations_stay_cached(network: MlxLmNetwork) -> None:
    chat = Chat(network)
    other = FIRST[::-1]
    said, _ = chat.ask(FIRST)
    said_there, _ = chat.ask(other)
    assert chat.ask([*FIRST, *said, 1, 2, 3])[1] == 4
    assert chat.ask([*other, *said_there, 1, 2, 3])[1] == 4
    assert chat.ask([*FIRST, *said, 7, 8])[1] <= 4  # another branch of the first; both stay
    assert chat.ask([*FIRST, *said, 1, 2, 3])[1] <= OPENING + 1


@pytest.mark.sampled
def test_kept_conversations_are_bounded_in_entries_and_bytes(network: MlxLmNetwork) -> None:
    spare = [1 << 30]
    options = KVOptions(LIMIT, keep_prefix=True, spare=lambda _: spare[0])
    kv: Any = network.kv_backend(options)
    for start in range(9):
        prompt = [start, *FIRST, *FIRST]
        cache = kv.acquire(prompt)
        list(prefill_chunks(network, kv, cache, prompt[:-1]))
        kv.release(cache, prompt)
    kept = list(kv._prefixes)
    assert [each.tokens[0] for each in kept] == list(range(9 - LIMIT // len(kept[0].tokens), 9))
    spare[0] = kept[-1].nbytes + kept[-2].nbytes
    kv.evict()
    assert list(kv._prefixes) == kept[-2:]
    spare[0] = 0
    kv.evict()
    assert kv.acquire(kept[-1].tokens).committed == 0


@pytest.mark.sampled
def test_prompts_of_a_batch_share_their_beginning(network: MlxLmNetwork) -> None:
    engine = Engine(network, context_limit=LIMIT, max_running=3)
    prompts = [[*FIRST * 6, *FIRST[:9], end, 3, end] for end in range(4)]
    sequences = [engine.submit(Request(prompt, max_tokens=WINDOW)) for prompt in prompts]
    said: dict[Any, list[int]] = {sequence: [] for sequence in sequences}
    while any(sequence.state != "finished" for sequence in sequences):
        for sequence, event in engine.step():
            said[sequence] += event.tokens if isinstance(event, Step) else ()
    assert list(said.values()) == [alone(network, tuple(prompt), WINDOW) for prompt in prompts]
    first, *others = [sequence.reused for sequence in sequences]
    assert first == 0
    assert all(BLOCK <= reused <= len(prompts[0]) - 3 for reused in others)
    assert engine.step() == []
    assert engine.kv.acquire(prompts[0]).committed == 0  # nothing outlives the last sequence


@pytest.mark.sampled
def test_a_stored_conversation_continues_in_another_engine(network: MlxLmNetwork, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 30)
    chat = Chat(network)
    later = Chat(network)
    prompt = [*FIRST * 6, 3]
    said, _ = chat.ask(prompt)
    conversation = [*prompt, *said]
    chat.engine.kv.store(conversation, store, lambda: True)
    assert store.nbytes == 0
    chat.engine.kv.store(conversation, store, never)
    chat.engine.kv.store(conversation, store, never)
    assert len(list(tmp_path.iterdir())) == 1
    for question in ([1, 2, 3], [4, 5]):
        later = Chat(network)
        later.engine.kv.load([*conversation, *question], store)
        assert later.ask([*conversation, *question])[1] == len(question) + 1
    later = Chat(network)
    later.engine.kv.load([*prompt, *said[3:], 7], store)  # as if the template dropped thinking
    assert later.ask([*prompt, *said[3:], 7])[1] <= len(said) + OPENING


@pytest.mark.sampled
def test_damaged_and_foreign_files_are_computed_again(network: MlxLmNetwork, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 30)
    chat = Chat(network)
    said, _ = chat.ask(FIRST)
    chat.engine.kv.store([*FIRST, *said], store, never)
    smaller: Any = network.kv_backend(KVOptions(len(FIRST), keep_prefix=True))
    smaller.load([*FIRST, *said, 1], store)  # longer than its context
    other: Any = network.kv_backend(KVOptions(LIMIT, keep_prefix=True, key=b"other weights"))
    other.load([*FIRST, *said, 1], store)
    assert [*smaller._prefixes, *other._prefixes] == []
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-50])
    later = Chat(network)
    later.engine.kv.load([*FIRST, *said, 1], store)
    assert later.ask([*FIRST, *said, 1])[1] == len(FIRST) + len(said) + 1
    assert list(tmp_path.iterdir()) == []


def test_every_attribute_of_a_cache_is_restored() -> None:
    tree = {"a": [None, mx.array([1.5], mx.bfloat16)], "b": (1, 2.5, "x", True), "c": {}, "d": []}
    arrays: list[mx.array] = []
    again = _unpack(_pack(tree, arrays), arrays)
    assert repr(again) == repr(tree)
    with pytest.raises(TypeError, match="set"):
        _pack({"e": {1}}, [])
