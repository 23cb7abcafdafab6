"""`headrace top` over scripted events."""

import asyncio
from typing import Any

from headrace.app.engine.events import BatchStatus, Died, Done, Event, Prefill, Ready
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.panel import Sections
from headrace.app.tui.decode.tables import SequencesSection
from headrace.app.tui.metrics.answers import TurnAnswers
from headrace.app.tui.metrics.facts import TurnFigures
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.top import TopApp, TopScreen
from headrace.app.tui.widgets.status_bar import StatusBar
from headrace.runtime.engine.request import Finished
from headrace.runtime.metrics.telemetry import PoolStats
from tests.support.deltas import delta
from tests.support.scripted_engine import CARD, record
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
            assert app.metrics.answers.is_several
            assert [row.phase for row in app.metrics.answers.rows] == ["done", "decode"]
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


def test_rows_of_answers_are_bounded_to_the_newest_and_running_ones() -> None:
    metrics = TurnAnswers((), max_rows=3)
    for number in range(1, 9):
        for event in answer(number, ended=number != 2):
            assert metrics.has(event)
            metrics.take(event)
    assert [row.number for row in metrics.rows] == [2, 7, 8]  # a running one stays
    for number in range(20, 25):
        for event in answer(number, ended=False):
            metrics.take(event)
    assert len(metrics.rows) == 6  # all of them run


def test_the_batch_speed_stays_positive_when_counters_restart() -> None:
    metrics = TurnAnswers((), max_rows=3)
    for tokens in (0, 100, 200, 0, 50):
        metrics.take(status({}, tokens))
    assert metrics.rate_average is None or metrics.rate_average >= 0
    assert metrics.rate_now is None or metrics.rate_now >= 0


def test_running_answers_and_the_pool_come_before_ended_answers() -> None:
    metrics = LiveMetrics()
    metrics.begin_batch((), 16)
    metrics.take([event for number in range(1, 13) for event in answer(number, ended=number not in (4, 12))])
    metrics.take([BatchStatus({}, 5, 1.0, (2,), 100, 1000, 2000, PoolStats(used=6, shared=2, cached=3, free=1))])
    metrics.set_turns([TurnFigures.of(1, make_summary(), "stop")])
    section = SequencesSection(metrics)
    for width, height in ((31, 7), (36, 7), (60, 12)):
        lines = [line.plain for line in section.lines(metrics, width, height)]
        rows = [int(line.split()[0]) for line in lines if line[:2].strip().isdigit()]
        assert rows[:3] == [4, 12, 11][: len(rows)]
        assert lines[-2] == "████▓▓▒▒▒·"
        assert lines[-1].startswith("prefix hits")
        assert section.border_subtitle == f"{len(rows)} of 12 answers"


def test_the_cache_meter_counts_no_tokens_of_ended_answers() -> None:
    metrics = LiveMetrics()
    metrics.begin_batch((), 16)
    metrics.take([*answer(1), BatchStatus({}, 5, 1.0, (1,), 0, 2 << 20, 2 << 20, None)])
    lines = [line.plain for line in MeterLines(metrics).lines(metrics, 78, MeterLines.HEIGHT)]
    assert lines[2].startswith("K/V cache    empty ")
    assert lines[2].endswith("room for 2.00 MiB")


def test_the_chart_shows_steps_of_an_answer_that_runs() -> None:
    metrics = TurnAnswers((), max_rows=16)
    ended = delta(1, "", [record(index, 10 + index) for index in range(9)], 0.05)
    for event in [Prefill(1, 9, 9, 3), ended, Done(1, Finished("stop", make_summary()))]:
        metrics.take(event)
    assert len(metrics.longest) == 9
    for event in answer(2, ended=False):
        metrics.take(event)
    assert len(metrics.longest) == 2
