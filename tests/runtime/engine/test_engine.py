"""The engine around the step loop: limits, cancel, refusals, and being ready again after every kind of end."""

import gc
import math
import sys
import threading
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prompt_chunks import CHUNK_STEP, FIRST, TARGET_S, ChunkSizer
from headrace.runtime.engine.request import CancelFlag, Finished, PrefillProgress, Request, Step
from headrace.runtime.errors import ContextLimitError, EngineError, NotEnoughMemoryError, UsageError
from headrace.runtime.machine import hardware, memory
from headrace.runtime.sampling.params import SamplingParams
from tests.support.alone import new_cache, prefill
from tests.support.patience import PATIENCE_S
from tests.support.watched import WatchedNetwork, answer, same_rows, split

PROMPT = [5, 17, 3, 88, 42, 9, 61]
LONG = [(7 * i * i + 3 * i + 5) % 96 for i in range(300)]


@pytest.fixture(scope="module")
def network(either: Decoder) -> Decoder:
    """With K/V in buffers, and in blocks."""
    return either


@pytest.mark.parametrize("max_tokens", [None, 100])
@pytest.mark.parametrize(("limit", "tokens"), [(7, 1), (8, 2), (12, 6)])
def test_the_context_limit_ends_with_length(network: Decoder, limit: int, tokens: int, max_tokens: int | None) -> None:
    said, end = answer(network, Request(PROMPT, max_tokens), context_limit=limit)
    assert (len(said), end.reason) == (tokens, "length")
    assert end.summary.kv_cache_bytes == limit * network.cost.kv_bytes_per_token  # filled to the last entry


def test_a_prompt_longer_than_the_context_is_refused_before_any_work(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    with pytest.raises(ContextLimitError, match=r"7 tokens, the context limit is 6"):
        next(Engine(watched, context_limit=6).generate(Request(PROMPT)))
    assert not watched.caches


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (Request([]), "empty"),
        (Request([1, 96]), "outside the vocabulary"),
        (Request([-1]), "outside the vocabulary"),
        (Request([1], max_tokens=0), "at least 1"),
    ],
)
def test_malformed_requests_are_refused_at_once(network: Decoder, request_: Request, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        next(Engine(network, context_limit=32).generate(request_))


def test_bad_sampling_settings_are_refused_before_prefill(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    events = Engine(watched, context_limit=32).generate(Request(PROMPT, sampling=SamplingParams(logit_bias={96: 1.0})))
    with pytest.raises(UsageError, match="token 96"):
        next(events)
    assert not watched.fed


def test_generation_ends_at_max_tokens_and_at_stop_ids(network: Decoder) -> None:
    free, _ = answer(network, Request(PROMPT, max_tokens=10))
    assert answer(network, Request(PROMPT, max_tokens=3))[0] == free[:3]
    said, end = answer(network, Request(PROMPT, max_tokens=10, stop_ids=frozenset([free[0]])))
    assert (said, end.reason, end.stop_id) == ([], "stop", free[0])
    assert (end.summary.completion_tokens, end.summary.steps) == (0, 1)
    unseen = next(token for token in range(96) if token not in free)
    assert answer(network, Request(PROMPT, max_tokens=10, stop_ids=frozenset([unseen])))[1].reason == "length"


def test_a_one_token_prompt_needs_no_prefill(network: Decoder) -> None:
    events = list(Engine(network, context_limit=32).generate(Request([5], max_tokens=2)))
    assert [type(event) for event in events] == [Step, Step, Finished]
    assert split(events)[1].summary.prefill_tokens == 0


def test_progress_covers_all_but_the_last_prompt_token(network: Decoder) -> None:
    events = list(Engine(network, context_limit=512).generate(Request(LONG, max_tokens=1)))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert progress[0] == PrefillProgress(FIRST, 299)
    assert progress[-1] == PrefillProgress(299, 299)
    assert [p.done for p in progress] == sorted({p.done for p in progress})


def test_prefill_never_asks_for_logits(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    cache = new_cache(watched, 512)
    assert list(prefill(watched, cache, LONG))[-1] == cache.committed == len(LONG)
    assert not watched.logits_seen


@pytest.mark.parametrize(("device", "largest"), [(mx.DeviceType.cpu, 512), (mx.DeviceType.gpu, 2048)])
@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.01, 0.4, 3.0, 1e6])
def test_chunks_follow_the_measured_speed_within_bounds(seconds: float, device: mx.DeviceType, largest: int) -> None:
    pace = ChunkSizer(device)
    pace.record(64, seconds)
    size = pace.size
    assert CHUNK_STEP <= size <= largest
    assert size % CHUNK_STEP == 0
    assert size in (CHUNK_STEP, largest) or size <= 64 / seconds * TARGET_S


def test_wide_chunks_have_1024_rows_where_that_takes_under_2_seconds() -> None:
    for device, rate, size in (
        (mx.DeviceType.gpu, 600.0, 1024),
        (mx.DeviceType.gpu, 4000.0, 1600),
        (mx.DeviceType.gpu, 511.0, 192),
        (mx.DeviceType.cpu, 600.0, 224),
    ):
        pace = ChunkSizer(device, wide=True)
        pace.record(64, 64 / rate)
        assert pace.size == size
    narrow = ChunkSizer(mx.DeviceType.gpu)
    narrow.record(64, 64 / 600)
    assert narrow.size == 224


def test_prefill_buffers_are_freed(network: Decoder) -> None:
    cache = new_cache(network, 1024)
    for _ in prefill(network, cache, LONG):
        pass
    assert mx.get_cache_memory() < 50_000


def test_the_next_prompt_begins_with_the_last_chunk_size(network: Decoder) -> None:
    pace = ChunkSizer()
    pace.record(64, 64 * TARGET_S / 96)
    done = list(prefill(network, new_cache(network, 512), LONG, pace))
    assert done[0] == 96


def test_cancel_before_the_first_token(network: Decoder) -> None:
    cancel = CancelFlag()
    cancel.set()
    watched = WatchedNetwork(network)
    said, end = answer(watched, Request(LONG, cancel=cancel), context_limit=512)
    assert (said, end.reason) == ([], "cancelled")
    assert not watched.fed
    assert (end.summary.first_step_s, end.summary.steps, end.summary.completion_tokens) == (None, 0, 0)
    assert end.summary.prefill_tokens == 0


def test_cancel_during_prefill_stops_after_that_chunk(network: Decoder) -> None:
    cancel = CancelFlag()
    watched = WatchedNetwork(network, on_pass=lambda n: cancel.set() if n == 1 else None)
    said, end = answer(watched, Request(LONG, cancel=cancel), context_limit=512)
    assert (said, end.reason, len(watched.fed)) == ([], "cancelled", 2)


def test_the_prefill_time_of_a_cancelled_request_is_reported(network: Decoder) -> None:
    cancel = CancelFlag()
    watched = WatchedNetwork(network, on_pass=lambda n: cancel.set() if n == 0 else None)
    _, end = answer(watched, Request(LONG, cancel=cancel), context_limit=512)
    assert 0 < end.summary.prefill_tokens < len(LONG) - 1
    assert end.summary.prefill_s > 0


@pytest.mark.parametrize("at", range(2, 7))
def test_cancel_during_decode_ends_within_two_steps(network: Decoder, at: int) -> None:
    cancel = CancelFlag()
    begun = 0

    def on_pass(n: int) -> None:
        nonlocal begun
        begun = n
        if n == at:  # pass 0 is prefill, pass n builds step n - 1
            cancel.set()

    said, end = answer(WatchedNetwork(network, on_pass=on_pass), Request(PROMPT, cancel=cancel))
    assert end.reason == "cancelled"
    assert begun - at <= 1  # no more than one step was begun after the flag
    assert at - 2 <= len(said) - 1 <= at


class BrokenError(RuntimeError):
    """An error that only a failing network raises."""


def _explode(at: int) -> Any:
    def on_pass(n: int) -> None:
        if n == at:
            raise BrokenError("device lost")

    return on_pass


@pytest.mark.parametrize("at", [0, 1, 2, 5], ids=["prefill", "first step", "lookahead", "later"])
def test_ready_again_after_an_error_inside_the_network(network: Decoder, at: int) -> None:
    watched = WatchedNetwork(network, on_pass=_explode(at))
    engine = Engine(watched, context_limit=64)
    with pytest.raises(BrokenError):
        list(engine.generate(Request(PROMPT, max_tokens=20)))
    engine.network = network
    assert split(list(engine.generate(Request(PROMPT, max_tokens=3))))[0] == answer(network, Request(PROMPT, 3))[0]


def test_ready_again_after_the_cache_could_not_be_made(network: Decoder) -> None:
    class NoMemory(WatchedNetwork):
        def watch(self, _cache: Any) -> Any:
            raise BrokenError("no room")

    engine = Engine(NoMemory(network), context_limit=64)
    for _ in range(2):
        with pytest.raises(BrokenError):
            next(engine.generate(Request(PROMPT)))


def test_a_second_generation_is_refused_while_one_is_open(network: Decoder) -> None:
    engine = Engine(network, context_limit=64)
    first = engine.generate(Request(PROMPT))
    second = engine.generate(Request(PROMPT))
    next(first)
    with pytest.raises(EngineError, match="already generating"):
        next(engine.generate(Request(PROMPT)))
    with pytest.raises(EngineError, match="already generating"):
        next(second)
    first.close()  # type: ignore[attr-defined]
    assert split(list(engine.generate(Request(PROMPT, max_tokens=1))))[1].reason == "length"


def test_generations_leak_no_state(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    engine = Engine(watched, context_limit=256)
    request = Request(PROMPT, max_tokens=8, sampling=SamplingParams(repetition_penalty=1.3, presence_penalty=0.5))
    first = split(list(engine.generate(request)))[0]
    list(engine.generate(Request(LONG[:100], max_tokens=5)))
    assert split(list(engine.generate(request)))[0] == first
    assert same_rows(watched.caches[0], watched.caches[2])


class Forgetful(WatchedNetwork):
    """Keeps no hold on the caches it made."""

    def watch(self, cache: Any) -> Any:
        return cache


@pytest.mark.sampled
@pytest.mark.parametrize("ending", ["length", "cancelled", "closed", "failed"])
def test_every_end_of_a_generation_frees_its_kv_memory(network: Decoder, ending: str) -> None:
    def once() -> None:
        cancel = CancelFlag()
        watched = Forgetful(network, on_pass=_explode(9 if ending == "failed" else -1))
        events = Engine(watched, context_limit=4096).generate(Request(LONG, max_tokens=20, cancel=cancel))
        try:
            for number, event in enumerate(events):
                assert mx.get_active_memory() > before + 100_000  # the cache is there meanwhile
                if number == 15 and ending == "cancelled":
                    cancel.set()
                if number == 15 and ending == "closed":
                    events.close()  # type: ignore[attr-defined]
                    break
                if isinstance(event, Finished):
                    break
        except BrokenError:
            assert ending == "failed"

    gc.collect()
    before = mx.get_active_memory()
    once()
    gc.collect()
    assert mx.get_active_memory() <= before
    assert ending == "failed" or mx.get_cache_memory() < 50_000  # a traceback outlives the engine's tidying up


def test_records_have_positions_tokens_and_times(network: Decoder) -> None:
    engine = Engine(network, context_limit=256)
    events = list(engine.generate(Request(PROMPT, max_tokens=9)))
    tokens, end = split(events)
    records = [event.record for event in events if isinstance(event, Step)]
    cost = network.cost
    assert [record.index for record in records] == list(range(9))
    assert [record.context for record in records] == [len(PROMPT) + i for i in range(9)]
    for record in records:
        assert record.weight_bytes == cost.weight_bytes
        assert record.kv_bytes_read == cost.kv_bytes_per_token * record.context
        assert record.kv_bytes_written == cost.kv_bytes_per_token
        assert record.kv_used_bytes == cost.kv_bytes_per_token * record.context
        assert record.kv_allocated_bytes >= record.kv_used_bytes
        assert 0 < record.active_memory_bytes <= record.peak_memory_bytes
    assert end.summary.steps == end.summary.completion_tokens == len(tokens) == 9
    assert end.summary.prompt_tokens - 1 == end.summary.prefill_tokens == len(PROMPT) - 1


def test_logprobs_come_with_each_step(network: Decoder) -> None:
    watched = WatchedNetwork(network)
    request = Request(PROMPT, max_tokens=4, logprobs=3)
    steps = [e for e in Engine(watched, context_limit=64).generate(request) if isinstance(e, Step)]
    for step, logits in zip(steps, watched.logits_seen, strict=True):
        assert step.logprobs is not None
        (chosen,) = step.logprobs
        values = logits[0].tolist()
        total = math.log(math.fsum(math.exp(v) for v in values))
        assert chosen.chosen == pytest.approx(values[step.tokens[0]] - total, abs=1e-5)
        ranked = sorted(range(96), key=lambda t: -values[t])[:3]
        assert [token for token, _ in chosen.top] == ranked
        assert chosen.top[0][1] == chosen.chosen  # greedy
    without = list(Engine(network, context_limit=64).generate(replace(request, logprobs=None)))
    assert all(event.logprobs is None for event in without if isinstance(event, Step))


class BigOnAMac:
    """A network whose weights take most of a Mac's working set, by its own account."""

    def __init__(self, network: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._network = network
        self.cost = replace(network.cost, weight_bytes=30 << 30)
        self.wired = [0]
        mac = replace(hardware.machine(), backend="metal", device_memory_bytes=48 << 30)
        monkeypatch.setattr(memory, "machine", lambda: mac)
        monkeypatch.setattr(mx, "set_wired_limit", lambda limit: self.wired.append(limit) or self.wired[-2])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def test_memory_is_wired_only_while_an_answer_is_made(network: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    big = BigOnAMac(network, monkeypatch)
    engine = Engine(big, context_limit=32, keep_prefix=True)
    events = engine.generate(Request(PROMPT, max_tokens=9))
    assert big.wired == [0]
    next(events)
    assert big.wired[-1] > 30 << 30
    events.close()  # as a cancelled answer does
    assert big.wired[-1] == 0
    list(engine.generate(Request(PROMPT, max_tokens=2)))
    assert max(big.wired[-3:]) > 30 << 30
    assert big.wired[-1] == 0


def test_no_memory_is_wired_while_sequences_share_the_device_or_a_cache_grows(
    network: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = BigOnAMac(network, monkeypatch)
    engine = Engine(big, context_limit=8192)
    engine.submit(Request(PROMPT, max_tokens=3))
    engine.step()
    assert big.wired[-1] > 30 << 30
    with memory.moving_buffers():
        assert big.wired[-1] == 0
    assert big.wired[-1] > 30 << 30
    del big.wired[:-1]
    engine.submit(Request(PROMPT, max_tokens=3))
    while engine.has_work:
        engine.step()
        assert big.wired[-1] == 0


METAL_SAYS = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU...ErrorOutOfMemory)"


def test_out_of_memory_is_an_error_with_figures(network: Decoder) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise RuntimeError(METAL_SAYS)

    engine = Engine(WatchedNetwork(network, on_pass=fail), context_limit=32, keep_prefix=True)
    with pytest.raises(NotEnoughMemoryError, match=r"memory ran out: .* in use, .* at most \(weights .*\)") as refused:
        list(engine.generate(Request(PROMPT, max_tokens=9)))
    assert "--context" in (refused.value.hint or "")
    assert "\n" not in str(refused.value)
    list(Engine(network, context_limit=32).generate(Request(PROMPT, max_tokens=2)))


def test_the_first_error_is_raised_if_work_after_it_fails_too(
    network: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int) -> None:
        if step == 2:
            monkeypatch.setattr(mx, "synchronize", second)
            raise RuntimeError(METAL_SAYS)

    def second() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors)")

    engine = Engine(WatchedNetwork(network, on_pass=fail), context_limit=32, keep_prefix=True)
    with pytest.raises(NotEnoughMemoryError):
        list(engine.generate(Request(PROMPT, max_tokens=9)))
    monkeypatch.undo()
    assert not engine.has_work


def test_other_errors_of_a_device_are_raised_unchanged(network: Decoder) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Invalid Resource")

    with pytest.raises(RuntimeError, match="Invalid Resource"):
        list(Engine(WatchedNetwork(network, on_pass=fail), context_limit=32).generate(Request(PROMPT, max_tokens=9)))


def test_a_cancel_flag_may_be_set_by_a_signal_during_set() -> None:
    """As by a second signal, between any two of its instructions."""
    flag = CancelFlag()

    def interrupt(frame: FrameType, _event: str, _argument: object) -> Any:
        frame.f_trace_opcodes = True
        flag.set()
        return interrupt

    def interrupted() -> None:
        sys.settrace(interrupt)
        flag.set()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert flag
