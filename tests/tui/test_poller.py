"""The interval at which the chat reads the engine, by its cost of drawing. The clock is the test's."""

import pytest

from headrace.app.tui.poller import PollInterval


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processor time; the test writes it."""
    now = [0.0]
    monkeypatch.setattr("time.process_time", lambda: now[0])
    return now


def look(interval: PollInterval, clock: list[float], cost_s: float) -> None:
    interval.begin()
    clock[0] += cost_s
    interval.drawn()


@pytest.mark.parametrize(
    ("spare", "cost_s", "rest_s"),
    [(False, 0.0009, 0.095), (False, 0.002, 0.2), (False, 0.1, 0.38), (True, 0.002, 0.095), (True, 0.1, 0.38)],
)
def test_the_pause_between_layouts_follows_their_cost_within_limits(
    clock: list[float], spare: bool, cost_s: float, rest_s: float
) -> None:
    interval = PollInterval()
    interval.spare = spare
    for _ in range(30):
        look(interval, clock, cost_s)
    assert interval.layout_s == pytest.approx(rest_s)


def test_one_slow_layout_does_not_stop_drawing(clock: list[float]) -> None:
    interval = PollInterval()
    interval.spare = False
    for _ in range(30):
        look(interval, clock, 0.001)
    look(interval, clock, 0.003)
    assert interval.layout_s == pytest.approx(0.2)


def test_polls_are_ten_a_second_fewer_when_idle_and_more_before_the_first_text(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    interval = PollInterval()
    look(interval, clock, 0.1)
    assert interval.wait_s(awaiting=False) == pytest.approx(0.095)
    assert interval.wait_s(awaiting=True) == pytest.approx(0.05)
    assert interval.wait_s(awaiting=False, idle=True) == pytest.approx(0.152)


def test_drawing_figures_does_not_count_as_cost_of_a_layout(clock: list[float]) -> None:
    interval = PollInterval()
    interval.spare = False
    look(interval, clock, 0.0005)
    interval.begin()
    interval.has_other_cost()
    clock[0] += 0.02
    interval.drawn()
    assert interval.layout_s == 0.095


def test_drawing_between_polls_does_not_count_as_cost(clock: list[float]) -> None:
    interval = PollInterval()
    interval.spare = False
    look(interval, clock, 0.001)
    before = interval.layout_s
    clock[0] += 5.0
    interval.drawn()
    assert interval.layout_s == before


def test_metrics_are_drawn_less_often_where_decoding_takes_every_core() -> None:
    interval = PollInterval()
    lively = interval.metrics_s
    interval.spare = False
    assert lively < interval.metrics_s <= 1.0
