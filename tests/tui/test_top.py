"""`headrace top` over scripted events."""

import asyncio
from typing import Any

from headrace.app.engine.events import BatchStatus, Died, Done, Event, Prefill, Ready
from headrace.app.tui.decode.panel import Sections
from headrace.app.tui.metrics.batch import BatchMetrics
from headrace.app.tui.top import TopApp, TopScreen
from headrace.app.tui.widgets.status_bar import StatusBar
from headrace.runtime.engine.request import Finished
from tests.app.scripted_engine import CARD, record
from tests.support.deltas import delta
from tests.support.summaries import make_summary


class Reader:
    """A TelemetryReader with events of the test."""

    def __init__(self) -> None:
        self.events: list[Event] = [Ready(CARD)]
        self.problem = ""
        self.closed = False

    def poll(self) -> list[Event]:
        events = self.events
        self.events = []
        return events

    def close(self) -> None:
        self.closed = True


def answer(number: int, *, ended: bool = True) -> list[Event]:
    events: list[Event] = [Prefill(number, 9, 9, 3), delta(number, "", [record(0, 10, 2), record(1, 11, 2)], 0.05)]
    return [*events, Done(number, Finished("stop", make_summary()))] if ended else events


def status(states: Any, tokens: int) -> BatchStatus:
    return BatchStatus(states, tokens, float(tokens), (2,), 100, 1000, 2000, None)


def test_rows_of_answers_appear_and_disappear() -> None:
    reader = Reader()
    app = TopApp(reader, "http://mill:8080")  # type: ignore[arg-type]

    async def scenario() -> None:
        async with app.run_test(size=(150, 45)) as pilot:
            await pilot.pause()
            app.take(reader.poll())
            assert app.metrics.phase == "idle"
            app.take([status({1: "decode", 2: "waiting"}, 5), *answer(1), *answer(2, ended=False)])
            screen = app.screen
            assert isinstance(screen, TopScreen)
            app.show()
            await pilot.pause()
            assert app.metrics.batch is not None
            assert [row.phase for row in app.metrics.batch.rows] == ["done", "decode"]
            assert [turn.number for turn in app.metrics.turns] == [1]
            shown = {section.NAME for section in screen.query_one(Sections).shown}
            assert {"sequences", "latency"} <= shown
            text = "\n".join(line.plain for line in screen.query_one(StatusBar).lines(app.metrics, 150, 1))
            assert CARD.name in text
            assert "mill:8080" in text
            await pilot.press("f7")
            frozen = app._frozen
            app.take([Died("")])
            app.show()
            assert screen.has_class("-frozen")
            assert frozen is not None
            assert frozen.phase != "dead" == app.metrics.phase
            await pilot.press("f7", "question_mark")
            assert not isinstance(app.screen, TopScreen)
            await pilot.press("escape", "q")
            assert reader.closed

    asyncio.run(scenario())


def test_an_endless_turn_keeps_the_newest_answers() -> None:
    metrics = BatchMetrics((), most=3)
    for number in range(1, 9):
        for event in answer(number, ended=number != 2):
            assert metrics.has(event)
            metrics.take(event)
    assert [row.number for row in metrics.rows] == [2, 7, 8]  # a running one stays
    for number in range(20, 25):
        for event in answer(number, ended=False):
            metrics.take(event)
    assert len(metrics.rows) == 6  # all of them run


def test_the_speed_begins_anew_after_a_rest() -> None:
    metrics = BatchMetrics((), most=3)
    for tokens in (0, 100, 200, 0, 50):
        metrics.take(status({}, tokens))
    assert metrics.rate_average is None or metrics.rate_average >= 0
    assert metrics.rate_now is None or metrics.rate_now >= 0
