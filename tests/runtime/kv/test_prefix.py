"""Prefix reuse: what is kept, what is fed again, and that it never changes what is said."""

import gc
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prompt_chunks import OPENING
from headrace.runtime.engine.request import CancelFlag, Event, Finished, PrefillProgress, Request, Step
from headrace.runtime.errors import ContextLimitError, EngineError, UsageError
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.sampling.params import SamplingParams
from tests.support.watched import WatchedNetwork, committed_rows, split

LIMIT = 160
FIRST = [5, 17, 3, 88, 42, 9, 61]
tokens = st.lists(st.integers(0, 95), max_size=40)


@pytest.fixture(scope="module")
def network(either: Decoder) -> Decoder:
    """With K/V in buffers, and in blocks."""
    return either


def conversation(network: object) -> Engine:
    return Engine(network, context_limit=LIMIT, keep_prefix=True)  # type: ignore[arg-type]


def fresh(network: Decoder, request: Request) -> tuple[list[int], Finished]:
    return split(list(Engine(network, context_limit=LIMIT).generate(request)))


@given(st.lists(tokens), tokens)
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    flat = [token for part in a for token in part]
    n = common_prefix(flat, b)
    assert flat[:n] == b[:n]
    assert n == min(len(flat), len(b)) or flat[n] != b[n]


def test_the_next_turn_prefills_new_tokens_only(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    engine = conversation(watched)
    said, _ = split(list(engine.generate(Request(FIRST, max_tokens=6))))
    fed = len(watched.fed)
    prompt = [*FIRST, *said, 1, 2, 3]
    events = list(engine.generate(Request(prompt, max_tokens=4)))
    answer, end = split(events)
    in_cache = len(FIRST) + len(said) - 1  # after the last step there was, the last token said was never fed
    assert watched.fed[fed].tolist() == [prompt[in_cache:-1]]
    assert events[0] == PrefillProgress(0, 3, in_cache)
    assert (end.summary.reused_tokens, end.summary.prefill_tokens) == (in_cache, 3)
    assert len(watched.caches) == (2 if network.pages else 1)
    assert answer == fresh(network, Request(prompt, max_tokens=4))[0]


def test_a_refused_request_keeps_the_cached_prefix(network: Decoder) -> None:
    engine = conversation(network)
    list(engine.generate(Request(FIRST, max_tokens=8)))
    with pytest.raises(UsageError, match="logit bias"):
        list(engine.generate(Request(FIRST, sampling=SamplingParams(logit_bias={10**6: 1.0}))))
    _, end = split(list(engine.generate(Request(FIRST, max_tokens=2))))
    assert end.summary.reused_tokens == len(FIRST) - 1


def test_a_repeated_prompt_prefills_its_last_token_only(network: Decoder) -> None:
    engine = conversation(network)
    first, _ = split(list(engine.generate(Request(FIRST, max_tokens=8))))
    events = list(engine.generate(Request(FIRST, max_tokens=8)))
    again, end = split(events)
    assert again == first
    assert (end.summary.reused_tokens, end.summary.prefill_tokens) == (len(FIRST) - 1, 0)
    assert events[0] == PrefillProgress(0, 0, len(FIRST) - 1)


def test_a_prompt_without_common_prefix_starts_an_empty_cache(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    engine = conversation(watched)
    list(engine.generate(Request(FIRST, max_tokens=3)))
    _, end = split(list(engine.generate(Request([90, *FIRST], max_tokens=3))))
    assert (len(watched.caches), end.summary.reused_tokens) == (2, 0)


def test_a_rotating_cache_is_reused_whole_or_from_a_mark(network: Decoder) -> None:
    watched = WatchedNetwork(network, forgets=True)
    engine = conversation(watched)
    first = [*FIRST, *range(20)]

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        said, end = split(list(engine.generate(Request(prompt, max_tokens=5))))
        assert said == fresh(network, Request(prompt, max_tokens=5))[0]
        return said, end.summary.reused_tokens

    said, _ = ask(first)
    second = [*first, *said, 7, 8, 9]
    assert ask(second)[1] == len(first) + 4  # whole
    assert ask([*second[:-1], 10])[1] == len(second) - 1  # the second prompt's end
    assert ask([*second[:-4], 1, 2])[1] == len(first) + 4  # the first answer's end
    assert ask([*first[:-3], 1, 2, 3])[1] == len(first) - 1 - OPENING  # a little before the first prompt's end
    assert ask([90, *first])[1] == 0


def test_the_stop_token_is_in_the_cached_prefix(network: Decoder) -> None:
    """A template closes the turn with it, so that a cache that forgets is the beginning of the next prompt."""
    engine = conversation(WatchedNetwork(network, forgets=True))
    free, _ = fresh(network, Request(FIRST, max_tokens=9))
    stop = free[-1]
    said, end = split(list(engine.generate(Request(FIRST, stop_ids=frozenset([stop])))))
    prompt = [*FIRST, *said, stop, 4, 5]
    _, again = split(list(engine.generate(Request(prompt, max_tokens=1))))
    assert end.stop_id == stop
    assert (again.summary.reused_tokens, again.summary.prefill_tokens) == (len(FIRST) + len(said) + 1, 1)


def test_without_keep_prefix_nothing_is_cached(network: Decoder) -> None:
    engine = Engine(network, context_limit=LIMIT)
    gc.collect()  # what earlier tests left behind must not go while we weigh
    before = mx.get_active_memory()
    for _ in range(2):
        _, end = split(list(engine.generate(Request(FIRST, max_tokens=3))))
        assert end.summary.reused_tokens == 0
        assert mx.get_active_memory() == before


def test_clearing_frees_memory(network: Decoder) -> None:
    engine = conversation(network)
    gc.collect()  # what earlier tests left behind must not go while we weigh
    before = mx.get_active_memory()
    list(engine.generate(Request(FIRST, max_tokens=3)))
    assert mx.get_active_memory() > before
    engine.kv.clear()
    assert mx.get_active_memory() == before


def test_after_an_error_the_cache_is_not_reused(network: Decoder) -> None:
    armed = [8]

    def explode(n: int) -> None:
        if n in armed:
            armed.clear()
            raise RuntimeError("device lost")

    watched = WatchedNetwork(network, on_pass=explode)
    engine = conversation(watched)
    list(engine.generate(Request(FIRST, max_tokens=3)))
    with pytest.raises(RuntimeError, match="device lost"):
        list(engine.generate(Request([*FIRST, 1], max_tokens=9)))
    _, end = split(list(engine.generate(Request(FIRST, max_tokens=3))))
    assert end.summary.reused_tokens == 0


def _whole(engine: Engine, request: Request) -> Iterator[Event]:
    return engine.generate(request)


def _cancelled_in_prefill(engine: Engine, request: Request) -> Iterator[Event]:
    for event in engine.generate(request):
        request.cancel.set()
        yield event


def _cancelled_in_decode(engine: Engine, request: Request) -> Iterator[Event]:
    for event in engine.generate(request):
        if isinstance(event, Step) and event.record.index == 2:
            request.cancel.set()
        yield event


def _closed(engine: Engine, request: Request) -> Iterator[Event]:
    events = engine.generate(request)
    for event in events:
        yield event
        if isinstance(event, Step) and event.record.index == 1:
            break
    events.close()  # type: ignore[attr-defined]


def _stopped(engine: Engine, request: Request) -> Iterator[Event]:
    return engine.generate(Request(request.prompt, max_tokens=9, stop_ids=frozenset(range(0, 96, 5))))


Ending = Callable[[Engine, Request], Iterator[Event]]
turns = st.lists(
    st.tuples(
        st.sampled_from([_whole, _cancelled_in_prefill, _cancelled_in_decode, _closed, _stopped]),
        st.integers(0, 120),  # how much of what was said so far stays: less is an edit or a branch
        tokens,
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.sampled
@settings(max_examples=10, deadline=None)
@given(turns, st.booleans())
def test_prefix_reuse_does_not_change_output(
    network: Decoder, turns: list[tuple[Ending, int, list[int]]], forgets: bool
) -> None:
    engine = conversation(WatchedNetwork(network, forgets=forgets))
    history = list(FIRST)
    for ending, kept, new in turns:
        prompt = ([*history[:kept], *new] or [1])[: LIMIT - 1]
        events = list(ending(engine, Request(prompt, max_tokens=5, cancel=CancelFlag())))
        said = [token for event in events if isinstance(event, Step) for token in event.tokens]
        assert said == fresh(network, Request(prompt, max_tokens=9))[0][: len(said)]
        history = prompt + said


@pytest.mark.sampled
@settings(max_examples=20, deadline=None)
@given(tokens, tokens)
def test_a_reused_cache_has_the_entries_of_a_new_one(network: Decoder, first: list[int], then: list[int]) -> None:
    engine = conversation(network)
    list(engine.generate(Request([3, *first], max_tokens=2)))
    prompt = [3, *first, *then]
    list(engine.generate(Request(prompt, max_tokens=1)))
    reused = engine.kv.acquire([*prompt, 0])
    alone = conversation(network)
    list(alone.generate(Request(prompt, max_tokens=1)))
    expected = alone.kv.acquire([*prompt, 0])
    assert reused.committed == expected.committed == len(prompt)
    for a, b in zip(committed_rows(reused), committed_rows(expected), strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_context_limit_counts_reused_tokens(network: Decoder) -> None:
    engine = Engine(network, context_limit=12, keep_prefix=True)
    said, end = split(list(engine.generate(Request(FIRST))))
    assert (len(said), end.reason) == (6, "length")
    prompt = [*FIRST, *said][:12]
    again, end = split(list(engine.generate(Request(prompt))))
    assert (end.summary.reused_tokens, again, end.reason) == (11, said[5:], "length")


def test_sampling_with_a_seed_does_not_depend_on_reuse(network: Decoder) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=4)
    request = Request([*FIRST, 8, 8, 8], max_tokens=12, sampling=sampling)
    engine = conversation(network)
    list(engine.generate(Request(FIRST, max_tokens=3)))
    assert split(list(engine.generate(request)))[0] == fresh(network, request)[0]


def never() -> bool:
    return False


def test_prefetched_tokens_are_not_prefilled_again(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    engine = conversation(watched)
    said, _ = split(list(engine.generate(Request(FIRST, max_tokens=6))))
    guess = [*FIRST, *said, 1, 2, 3, 4]
    read = engine.prefetch(guess, never)
    assert read is not None
    assert read.tokens == len(guess) - 1
    prompt = [*guess[:-2], 8, 9]  # the end of the guess was wrong
    answer, end = split(list(engine.generate(Request(prompt, max_tokens=4))))
    assert (end.summary.reused_tokens, end.summary.prefill_tokens) == (len(guess) - 2, 1)
    assert answer == fresh(network, Request(prompt, max_tokens=4))[0]


def test_a_first_prompt_can_be_prefetched(network: Decoder) -> None:
    engine = conversation(network)
    engine.prefetch(FIRST, never)
    answer, end = split(list(engine.generate(Request(FIRST, max_tokens=4))))
    assert end.summary.reused_tokens == len(FIRST) - 1
    assert answer == fresh(network, Request(FIRST, max_tokens=4))[0]


def test_prefetch_stops_between_chunks_and_keeps_them(network: Decoder) -> None:
    prompt = [(7 * i) % 96 for i in range(120)]
    engine = conversation(network)
    read = engine.prefetch(prompt, lambda: True)
    assert read is not None
    assert 0 < read.tokens < len(prompt) - 1
    _, end = split(list(engine.generate(Request(prompt, max_tokens=1))))
    assert end.summary.reused_tokens == read.tokens


def test_a_wrong_prefetch_drops_only_its_tokens_from_a_windowed_cache(network: Decoder) -> None:
    engine = conversation(WatchedNetwork(network, forgets=True))
    said, _ = split(list(engine.generate(Request(FIRST, max_tokens=5))))
    engine.prefetch([*FIRST, *said, 1, 2, 3], never)
    engine.prefetch([*FIRST, *said, 1, 2, 4, 5], never)
    prompt = [*FIRST, *said, 7, 8]
    answer, end = split(list(engine.generate(Request(prompt, max_tokens=4))))
    assert end.summary.reused_tokens == len(FIRST) + 4
    assert answer == fresh(network, Request(prompt, max_tokens=4))[0]


def test_prefetch_is_refused_like_a_request(network: Decoder) -> None:
    engine = conversation(network)
    with pytest.raises(UsageError, match="empty"):
        engine.prefetch([], never)
    with pytest.raises(ContextLimitError):
        engine.prefetch([1] * (LIMIT + 1), never)
    generation = engine.generate(Request(FIRST))
    next(generation)
    with pytest.raises(EngineError, match="already generating"):
        engine.prefetch(FIRST, never)
