"""Several requests in one batch: each has the answer it has alone, and can be cancelled alone."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine import batch_monitor, outbox
from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import TIMED_EVERY, Generate
from headrace.app.engine.events import BatchStatus, ContextFull, Delta, Done, Event, Failed, Ready
from headrace.app.engine.host import EngineHost
from headrace.app.engine.outbox import SERVED_TEXT_S, TEXT_S
from headrace.app.engine.process import CommandLoop
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import NotEnoughMemoryError
from tests.support.hosted import begin
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END

HELLO = [{"role": "user", "content": "hello"}]
NO_END = AnswerOptions(temperature=1.0, logit_bias={IM_END: -100})


@pytest.fixture(scope="module")
def host(model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineHost:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(tmp_path_factory.mktemp("home")))
        return EngineHost.load(ModelSpec(str(model), context=600), lambda *_: None)


def asked(number: int, tokens: int = 20, **change: Any) -> Generate:
    options = replace(NO_END, seed=number, max_tokens=tokens)
    return Generate(**{"id": number, "messages": HELLO, "options": options} | change)


def run(
    host: EngineHost, events: list[Event], after: Callable[[], None] = lambda: None, timed_every: int = TIMED_EVERY
) -> None:
    while host.busy:
        host.step(events.append, timed_every)
        after()


def said(events: list[Event], number: int) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.id == number)


def alone(host: EngineHost, number: int, tokens: int = 20) -> str:
    events: list[Event] = []
    begin(host, asked(number, tokens), CancelFlag(), events.append)
    run(host, events)
    assert not [event for event in events if isinstance(event, BatchStatus)]
    return said(events, number)


def test_batching_does_not_change_output(host: EngineHost) -> None:
    events: list[Event] = []
    for number in (1, 2):
        begin(host, asked(number), CancelFlag(), events.append)
    for _ in range(5):
        host.step(events.append)
    begin(host, asked(3), CancelFlag(), events.append)  # joins the others
    run(host, events)
    assert {event.id: event.end.reason for event in events if isinstance(event, Done)} == dict.fromkeys(
        (1, 2, 3), "length"
    )
    for number in (1, 2, 3):
        assert said(events, number) == alone(host, number)
    batches = {record.batch for event in events if isinstance(event, Delta) for record in event.records}
    assert batches >= {2, 3}


def test_cancelling_one_answer_does_not_stop_the_others(host: EngineHost) -> None:
    flags = {number: CancelFlag() for number in (1, 2)}
    events: list[Event] = []
    for number, flag in flags.items():
        begin(host, asked(number), flag, events.append)

    def cancel_the_first() -> None:
        if said(events, 1):
            flags[1].set()

    run(host, events, cancel_the_first)
    first, second = (event for event in events if isinstance(event, Done))
    assert (first.id, first.end.reason) == (1, "cancelled")
    assert (second.id, second.end.reason, second.end.summary.completion_tokens) == (2, "length", 20)
    assert said(events, 2) == alone(host, 2)
    assert alone(host, 1).startswith(said(events, 1))


def test_a_prompt_that_is_too_long_does_not_change_other_answers(host: EngineHost) -> None:
    events: list[Event] = []
    begin(host, asked(1), CancelFlag(), events.append)
    begin(host, asked(2, messages=[{"role": "user", "content": "x" * 900}]), CancelFlag(), events.append)
    run(host, events)
    assert [event.id for event in events if isinstance(event, ContextFull)] == [2]
    assert said(events, 1) == alone(host, 1)
    assert not host.busy


def test_status_covers_all_running_requests(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_monitor, "_INTERVAL_S", float("inf"))  # only the first and the last
    events: list[Event] = []
    for number in (1, 2):
        begin(host, asked(number, 20 * number), CancelFlag(), events.append)
    run(host, events)
    first, last = (event for event in events if isinstance(event, BatchStatus))
    assert set(first.states) == {1, 2}
    assert first.kv_used_bytes <= first.kv_room_bytes
    assert last is events[-1]
    assert not last.states
    assert last.kv_used_bytes == 0  # given back


@pytest.mark.parametrize("timed_every", [16, 0])
def test_records_of_all_steps_are_sent(host: EngineHost, timed_every: int) -> None:
    events: list[Event] = []
    begin(host, asked(1), CancelFlag(), events.append)
    run(host, events, timed_every=timed_every)
    deltas = [event for event in events if isinstance(event, Delta)]
    records = [record for delta in deltas for record in delta.records]
    assert sum(record.tokens for record in records) == 20
    assert len(records) == sum(len(delta.steps) for delta in deltas)
    assert said(events, 1) == alone(host, 1) != ""


@pytest.mark.parametrize(("serving", "answers", "steps"), [(False, 1, 2), (False, 4, 2), (True, 1, 4), (True, 4, 8)])
def test_text_is_sent_at_the_interval_of_its_reader(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch, serving: bool, answers: int, steps: int
) -> None:
    """A chat gets a delta every 70 ms; a client of a server every 30 ms, or at longer times among many."""
    if serving:
        monkeypatch.setattr(host, "_serving", True)
        monkeypatch.setattr(host, "_text_s", SERVED_TEXT_S)
    now = [0.0]
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_time() -> None:
        now[0] += (SERVED_TEXT_S / 4 if serving else TEXT_S / 2) * 1.01  # per step

    events: list[Event] = []
    for number in range(answers):
        begin(host, asked(number), CancelFlag(), events.append)
    run(host, events, pass_time)
    for number in range(answers):
        deltas = [event for event in events if isinstance(event, Delta) and event.id == number]
        # The first step has no whole character here, and the first text is not held back.
        assert {len(delta.records) for delta in deltas[2:-1]} == {steps}


def test_the_engine_sends_text_at_the_rate_of_chat_or_server(model: Path, host: EngineHost) -> None:
    served = EngineHost.load(ModelSpec(str(model), context=600, serving=True), lambda *_: None)
    for each, seconds in ((host, TEXT_S), (served, SERVED_TEXT_S)):
        begin(each, asked(1, 2), CancelFlag(), lambda _: None)
        [running] = each._running.values()
        assert running.outbox.text_s == seconds
        run(each, [])


class Broken:
    """A host that runs out of memory with three running requests."""

    busy = True
    idle = None

    def step(self, *_: Any) -> None:
        raise NotEnoughMemoryError("no memory", "a hint")

    def drop(self) -> list[int]:
        Broken.busy = False
        return [4, 5, 6]


class Silent:
    """An inbox without commands."""

    timed_every = 0
    kv_bytes = None

    def put(self, _: Any) -> None: ...

    def next(self, _: Any, *, joins: bool = False) -> None:
        if not joins:
            raise EOFError


def test_every_request_gets_the_error_of_a_failed_engine() -> None:
    events: list[Event] = []
    loop = CommandLoop(Silent(), events.append)  # type: ignore[arg-type]
    loop._host = Broken()  # type: ignore[assignment]
    with pytest.raises(EOFError):
        loop.run()
    assert events == [Failed(number, "no memory", "a hint", "NotEnoughMemoryError") for number in (4, 5, 6)]


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient()
    yield client
    client.close()


def test_answers_in_the_engine_process_end_independently(client: EngineClient, model: Path) -> None:
    client.start(ModelSpec(str(model), context=100_000))
    for number in (1, 2, 3):
        client.submit(asked(number, 60 if number == 3 else 90_000))  # they wait for the model
    events: list[Event] = []
    stopped: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(ends := [event for event in events if isinstance(event, Done)]) < 3 and time.monotonic() < deadline:
        events += client.poll()
        if said(events, 1) and said(events, 2) and 1 not in stopped:
            client.cancel(1)
            stopped.add(1)
        if 3 in {end.id for end in ends} and 1 in {end.id for end in ends}:
            client.cancel()
        time.sleep(0.005)
    assert {end.id: end.end.reason for end in ends} == {1: "cancelled", 2: "cancelled", 3: "length"}
    assert next(end for end in ends if end.id == 2) is ends[-1]
    assert any(isinstance(event, Ready) for event in events)
    assert any(isinstance(event, BatchStatus) and len(event.states) > 1 for event in events)
