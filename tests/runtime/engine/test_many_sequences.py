"""Many sequences at a time: everyone's events are what it gets alone, whoever is beside it, joins or steps back."""

import gc
import random
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag, Event, Finished, PrefillProgress, Request, SequenceFailed, Step
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import ContextLimitError, EngineError, NotEnoughMemoryError, UsageError
from headrace.runtime.ops import reference
from headrace.runtime.sampling.params import SamplingParams
from tests.support.kernels import FAST
from tests.support.steady import SteadyPace
from tests.support.tiny import load_decoder, quantize_model, write_model
from tests.support.watched import WatchedNetwork, same_rows, split

LIMIT = 512
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
PENALISED = SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, logit_bias={7: 2.0})


@pytest.fixture(scope="module")
def network(either: Decoder) -> Decoder:
    """With K/V in buffers, and in blocks."""
    return either


def prompt_of(number: int, length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5 * number + 1) % 96 for i in range(length)]


REQUESTS = [
    Request(prompt_of(0, 7), max_tokens=20),
    Request(prompt_of(1, 1), max_tokens=9),
    Request(prompt_of(2, 90), max_tokens=30, logprobs=3),
    Request(prompt_of(3, 12), max_tokens=25, sampling=SAMPLED),
    Request(prompt_of(4, 40), max_tokens=1),
    Request(prompt_of(5, 5), max_tokens=40, sampling=replace(SAMPLED, seed=12), logprobs=0),
    Request(prompt_of(6, 33), max_tokens=17, sampling=PENALISED),
    Request(prompt_of(7, 3), stop_ids=frozenset(range(0, 96, 9))),
]


def serve(engine: Engine, requests: list[Request]) -> list[list[Event]]:
    """The events of each request, all submitted at once."""
    sequences = [engine.submit(request) for request in requests]
    events = drive(engine)
    return [events[sequence] for sequence in sequences]


def drive(engine: Engine, between: Callable[[], None] = lambda: None) -> dict[Sequence, list[Event]]:
    """Step until nothing is left to do."""
    events: dict[Sequence, list[Event]] = defaultdict(list)
    while engine.has_work:
        for sequence, event in engine.step():
            events[sequence].append(event)
        between()
    return events


def said(events: list[Event]) -> list[tuple[int, Any]]:
    said = [event for event in events if isinstance(event, Step)]
    return [pair for step in said for pair in zip(step.tokens, step.logprobs or [None] * len(step.tokens), strict=True)]


def alone(network: Any, request: Request) -> list[Event]:
    """Return the events of a request by itself, computed once for each of REQUESTS."""
    for number, known in enumerate(REQUESTS):
        if request is known:
            return list(_alone(network, number))
    return list(Engine(network, context_limit=LIMIT).generate(request))


@cache
def _alone(network: Any, number: int) -> list[Event]:
    return list(Engine(network, context_limit=LIMIT).generate(REQUESTS[number]))


@pytest.mark.sampled
@pytest.mark.parametrize(("max_running", "joins"), [(1, True), (3, True), (3, False), (16, True), (16, False)])
def test_each_sequence_has_the_tokens_it_has_alone(network: Decoder, max_running: int, joins: bool) -> None:
    watched = WatchedNetwork(network)
    watched.joins = joins
    for request, events in zip(
        REQUESTS, serve(Engine(watched, context_limit=LIMIT, max_running=max_running), REQUESTS), strict=True
    ):
        expected = alone(network, request)
        tokens, end = split(events)
        assert said(events) == said(expected)
        assert (end.reason, end.stop_id) == (split(expected)[1].reason, split(expected)[1].stop_id)
        assert end.summary.completion_tokens == len(tokens)
        assert end.summary.prefill_tokens == len(request.prompt) - 1
        progress = [event.done for event in events if isinstance(event, PrefillProgress)]
        assert progress == sorted(set(progress))
        assert (progress[-1] if progress else 0) == len(request.prompt) - 1
        kinds = [type(event) for event in events]
        assert kinds == sorted(kinds, key=[PrefillProgress, Step, Finished].index)


def test_a_pass_runs_all_sequences_and_its_records_count_them(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    requests = [Request(prompt_of(i, 5), max_tokens=10 + i) for i in range(4)]
    events = serve(Engine(watched, context_limit=64), requests)
    steps = [tokens.shape for tokens in watched.fed if tokens.shape[1] <= 4]
    assert (1, 4) in steps
    assert len(steps) <= 13 + 3
    for ours in events:
        records = [event.record for event in ours if isinstance(event, Step)]
        assert [record.index for record in records] == list(range(len(records)))
        assert [record.context for record in records] == [5 + i for i in range(len(records))]
        assert {record.weight_bytes for record in records} == {network.cost.weight_bytes}
        assert records[2].batch == 4
    assert [event.record.batch for event in events[-1] if isinstance(event, Step)][-1] == 1


@pytest.mark.sampled
def test_sequences_join_between_steps(network: Decoder) -> None:
    engine = Engine(network, context_limit=LIMIT)
    pending = list(REQUESTS)
    sequences = []

    def join() -> None:
        if pending and len(sequences) * 3 < drove[0]:
            sequences.append(engine.submit(pending.pop(0)))
        drove[0] += 1

    drove = [1]
    join()
    events = drive(engine, join)
    assert not pending
    for request, sequence in zip(REQUESTS, sequences, strict=True):
        assert said(events[sequence]) == said(alone(network, request))


def test_a_prompt_is_prefilled_in_passes_that_decode(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    engine = Engine(watched, context_limit=LIMIT, chunk_budget=SteadyPace(50))
    first = engine.submit(Request(prompt_of(0, 4), max_tokens=60))
    while not any(isinstance(event, Step) for _, event in engine.step()):
        pass
    second = engine.submit(Request(prompt_of(1, 200), max_tokens=3))
    kinds = ["first" if sequence is first else type(event).__name__ for sequence, event in _all(engine)]
    chunks = [i for i, kind in enumerate(kinds) if kind == "PrefillProgress"]
    assert len(chunks) == 4
    assert all("first" in kinds[a:b] for a, b in pairwise(chunks))
    assert any(tokens.shape[1] > 2 for tokens in watched.fed[2:])
    assert second.state == "finished"


def _all(engine: Engine) -> Any:
    while engine.has_work:
        yield from engine.step()


@pytest.mark.sampled
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_waiting_and_a_running_sequence_can_be_cancelled(network: Decoder, by_flag: bool) -> None:
    watched = WatchedNetwork(network)
    engine = Engine(watched, context_limit=LIMIT, max_running=2)
    sequences = [engine.submit(Request(prompt_of(i, 9), max_tokens=30, cancel=CancelFlag())) for i in range(4)]
    events: dict[Sequence, list[Event]] = defaultdict(list)
    steps = 0
    while engine.has_work:
        for sequence, event in engine.step():
            events[sequence].append(event)
        steps += 1
        if steps == 6:
            for sequence in (sequences[0], sequences[3]):
                if by_flag:
                    sequence.request.cancel.set()
                else:
                    engine.cancel(sequence)
            for sequence, event in engine.step():
                events[sequence].append(event)
            assert [sequences[i].state for i in (0, 3)] == ["finished"] * 2
    assert [split(events[sequence])[1].reason for sequence in sequences] == [
        "cancelled",
        "length",
        "length",
        "cancelled",
    ]
    assert events[sequences[3]] == [events[sequences[3]][-1]]
    assert split(events[sequences[3]])[1].summary.steps == 0
    for sequence in sequences[1:3]:
        assert said(events[sequence]) == said(alone(network, sequence.request))
    engine.cancel(sequences[1])  # it has ended: nothing happens
    assert not engine.step()


def test_generate_is_refused_while_sequences_are_open(network: Decoder) -> None:
    engine = Engine(network, context_limit=64)
    request = Request(prompt_of(0, 5), max_tokens=4)
    sequence = engine.submit(request)
    with pytest.raises(EngineError, match="already generating"):
        next(engine.generate(request))
    drive(engine)
    events = engine.generate(request)
    next(events)
    with pytest.raises(EngineError, match="already generating"):
        engine.submit(request)
    events.close()  # type: ignore[attr-defined]
    assert sequence.state == "finished"
    assert split(serve(engine, [request])[0])[1].reason == "length"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request([]), UsageError),
        (Request([96]), UsageError),
        (Request([1], max_tokens=0), UsageError),
        (Request([1], sampling=SamplingParams(logit_bias={96: 1.0})), UsageError),
        (Request([1] * 65), ContextLimitError),
    ],
)
def test_malformed_requests_are_refused_at_submission(network: Decoder, request_: Request, error: type) -> None:
    engine = Engine(network, context_limit=64)
    with pytest.raises(error):
        engine.submit(request_)
    assert not engine.has_work


def test_a_request_larger_than_memory_is_refused_with_figures(network: Decoder) -> None:
    engine = Engine(network, context_limit=LIMIT, kv_memory=100 * network.cost.kv_bytes_per_token)
    with pytest.raises(NotEnoughMemoryError, match=r"the K/V of 101 tokens takes .* but .* may be used") as refused:
        engine.submit(Request(prompt_of(0, 101)))
    assert "up to 100 tokens" in (refused.value.hint or "")
    (events,) = serve(engine, [Request(prompt_of(0, 90))])
    tokens, end = split(events)
    assert (len(tokens), end.reason) == (11, "length")


class BrokenError(RuntimeError):
    """An error that only a failing network raises."""


def test_an_error_ends_all_sequences_and_the_engine_is_ready_again(network: Decoder) -> None:
    def explode(n: int) -> None:
        if n == 6:
            raise BrokenError

    engine = Engine(WatchedNetwork(network, on_pass=explode), context_limit=64, max_running=2)
    sequences = [engine.submit(Request(prompt_of(i, 5), max_tokens=20)) for i in range(4)]
    with pytest.raises(BrokenError):
        drive(engine)
    assert {sequence.state for sequence in sequences} == {"finished"}
    assert not engine.has_work
    assert engine.load().kv_used_bytes == 0
    engine.network = network
    request = Request(prompt_of(0, 5), max_tokens=5)
    assert said(serve(engine, [request])[0]) == said(alone(network, request))


class _Wrong:
    """Stop ids and a cancel flag that raise, the third time that they are asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __contains__(self, _token: int) -> bool:
        return bool(self)

    def __bool__(self) -> bool:
        self.asked += 1
        if self.asked == 3:
            raise ValueError("wrong")
        return False


PARTS = ["begin", "adjust", "record", "stop_ids", "cancel"]


@pytest.mark.sampled
@pytest.mark.parametrize("part", PARTS)
def test_an_error_of_one_sequence_ends_it_alone(network: Decoder, part: str) -> None:
    keeps = (PARTS.index(part) + network.pages) % 2 == 1  # in turn: all pairs of part, layout of K/V and this
    engine = Engine(network, context_limit=LIMIT, keep_prefix=keeps)
    sequences = [engine.submit(request) for request in REQUESTS[:6]]
    wrong = _Wrong()
    given: dict[str, Any] = {part: wrong} if part in ("stop_ids", "cancel") else {}
    broken = engine.submit(Request(prompt_of(8, 6), max_tokens=30, sampling=PENALISED, **given))
    if not given:
        assert broken.sampler is not None
        right = getattr(broken.sampler, part)
        setattr(broken.sampler, part, lambda *told: bool(wrong) or right(*told))
    events = drive(engine)
    last = events[broken].pop()
    assert isinstance(last, SequenceFailed)
    assert isinstance(last.error, EngineError)
    assert str(last.error) == "the answer failed: ValueError: wrong"
    again = Request(prompt_of(8, 6), max_tokens=30, sampling=PENALISED)
    tokens = said(alone(network, again))
    assert said(events[broken]) == tokens[: len(said(events[broken]))]
    for sequence, request in zip(sequences, REQUESTS, strict=False):
        assert said(events[sequence]) == said(alone(network, request))
    assert engine.load().kv_used_bytes == 0
    assert broken.cache is None
    assert said(serve(engine, [again])[0]) == tokens


def test_an_error_of_a_sampler_is_raised_by_its_generation(network: Decoder) -> None:
    engine = Engine(network, context_limit=LIMIT)
    with pytest.raises(EngineError, match="ValueError: wrong"):
        list(engine.generate(Request(prompt_of(8, 6), max_tokens=30, stop_ids=_Wrong())))  # type: ignore[arg-type]
    assert len(list(engine.generate(REQUESTS[0]))) > 1


@pytest.mark.sampled
def test_memory_is_freed_when_all_sequences_have_ended(network: Decoder) -> None:
    serve(Engine(network, context_limit=LIMIT), REQUESTS)  # what is made once and stays is there
    gc.collect()
    before = mx.get_active_memory()
    engine = Engine(network, context_limit=LIMIT)
    sequences = [engine.submit(request) for request in REQUESTS]
    used = []
    drive(engine, lambda: used.append(engine.load()))
    assert max(load.kv_used_bytes for load in used) > 0
    assert max(load.decoding for load in used) >= 4
    assert engine.load() == replace(used[-1], waiting=0, preempted=0, prefilling=0, decoding=0, kv_used_bytes=0)
    assert {sequence.cache for sequence in sequences} == {None}
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() < 50_000


def test_a_conversation_reuses_its_prefix_among_others(network: Decoder) -> None:
    engine = Engine(network, context_limit=LIMIT, keep_prefix=True)
    first = split(list(engine.generate(Request(prompt_of(0, 20), max_tokens=5))))[0]
    again = Request([*prompt_of(0, 20), *first, 3, 4], max_tokens=6)
    other = Request(prompt_of(5, 20), max_tokens=6)
    events = serve(engine, [again, other])
    assert [split(ours)[1].summary.reused_tokens for ours in events] == [24, 0]
    assert [said(ours) for ours in events] == [said(alone(network, request)) for request in (again, other)]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """On the kernels, where there are any."""
    root = tmp_path_factory.mktemp("quantized")
    return load_decoder(quantize_model(write_model(root / "plain", "llama"), root / "model"), FAST)


@pytest.mark.sampled
@pytest.mark.parametrize("short", [False, True], ids=["room", "short of memory"])
def test_batching_does_not_change_output(quantized: Decoder, short: bool) -> None:
    """300 tokens each; others join, end, are cancelled and, where memory is short, step back."""
    chance = random.Random(1)
    room = 3 * 256 if short else 16 * LIMIT
    bytes_per_token = quantized.cost.kv_bytes_per_token
    engine = Engine(quantized, context_limit=LIMIT, max_running=8, kv_memory=room * bytes_per_token)
    kept = [
        engine.submit(
            Request(
                prompt_of(i, chance.randint(1, 100)),
                max_tokens=300,
                sampling=replace(SAMPLED, seed=i) if i % 2 else SamplingParams(),
                speculate="off" if short else "ngram",  # so that they are long at the same time
            )
        )
        for i in range(2 if short else 4)
    ]
    stepped_back = 0
    passing: list[Sequence] = []

    def others() -> None:
        nonlocal stepped_back
        stepped_back += any(sequence.state == "preempted" for sequence in kept)
        if chance.random() < 0.05 and not short and engine.load().waiting < 4:
            passing.append(engine.submit(Request(prompt_of(9, chance.randint(1, 40)), chance.randint(1, 60))))
        if passing and chance.random() < 0.02:
            engine.cancel(chance.choice(passing))

    events = drive(engine, others)
    for sequence in kept:
        assert said(events[sequence]) == said(alone(quantized, sequence.request))
    for sequence in passing:
        assert split(events[sequence])[1].reason in ("length", "cancelled")
    assert bool(stepped_back) == short


def test_batching_does_not_change_bits_of_logits(quantized: Decoder) -> None:
    """On the kernels: log probabilities of the whole vocabulary, and K/V, are equal bit for bit."""
    requests = [Request(prompt_of(i, 6 + i), max_tokens=40, logprobs=96) for i in range(5)]
    together = WatchedNetwork(quantized)
    single = WatchedNetwork(quantized)
    events = serve(Engine(together, context_limit=64), requests)
    expected = [list(Engine(single, context_limit=64).generate(request)) for request in requests]
    if FAST is reference:
        pytest.skip("stock MLX promises tokens, not bits")
    assert [said(ours) for ours in events] == [said(ours) for ours in expected]
    assert all(same_rows(a, b) for a, b in zip(together.caches, single.caches, strict=True))
