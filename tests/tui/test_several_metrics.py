"""The figures of answers that grow side by side, and the map of the pool: plain numbers and lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.engine.events import BatchStatus, Delta, Died, Done, Failed, Prefill
from headrace.app.tui.decode.batch_size import squeezed
from headrace.app.tui.decode.pool_map import parts, pool_map
from headrace.app.tui.decode.sequences import SequencesSection
from headrace.app.tui.metrics.batch import BatchMetrics
from headrace.app.tui.metrics.feed import feed
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.metrics.telemetry import PoolStats
from tests.app.scripted_engine import COST, record, summary


def served(at: float, tokens: int, batches: tuple[int, ...] = (), **states: str) -> BatchStatus:
    by_id = {int(name[1:]): state for name, state in states.items()}
    return BatchStatus(by_id, tokens, at, batches, 1 << 20, 1 << 30, 4 << 20, PoolStats(6, 2, 3, 1))  # type: ignore[arg-type]


def delta(number: int, steps: range, batch: int) -> Delta:
    return Delta(number, "x", tuple(record(step, 20 + step, batch) for step in steps))


def done(number: int, said: int, reason: str = "stop") -> Done:
    return Done(number, reason, summary(20, 0, said), False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "height", "beside"), [(130, 20, True), (56, 20, False), (36, 12, False)])
def test_where_there_is_room_the_steps_of_each_are_a_chart(width: int, height: int, beside: bool) -> None:
    metrics = LiveMetrics()
    metrics.begin_batch((7, 9))
    feed(metrics, [delta(7, range(40), 2), delta(9, range(20), 2), BatchStatus({}, 0, 0.0, (), 0, 0, 0, None)])
    lines = [line.plain for line in SequencesSection(metrics).lines(metrics, width, height)]
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert [line[:1] for line in lines if line[:1].strip() and line[:1] < "⠀"] == ["1", "2"]
    charted = [any("⠀" <= cell <= "⣿" for cell in line) for line in lines]
    assert charted[1:].count(True) >= 2
    assert ("latency" in lines[0]) == beside
    short = SequencesSection(metrics).lines(metrics, 36, 4)
    assert not any("⠀" <= cell <= "⣿" for line in short for cell in line.plain)


def test_a_row_for_each() -> None:
    several = BatchMetrics((7, 9))
    several.take(Prefill(7, 3, 19, 0))
    several.take(delta(9, range(4), 2))
    first, second = several.rows
    assert (first.number, first.phase, first.prefill_done, first.prefill_total) == (1, "prefill", 3, 19)
    assert (second.number, second.phase, second.tokens, len(second.latencies_s)) == (2, "decode", 4, 3)
    assert second.tokens_per_second == pytest.approx(3 / sum(record(n, 20).latency_s for n in (1, 2, 3)))
    assert several.growing == 2
    several.take(served(1.0, 4, (), n7="preempted", n9="decode"))
    assert first.phase == "preempted"
    several.take(done(9, 3))
    several.take(served(1.5, 4, (), n9="finished"))
    assert (second.phase, second.tokens) == ("done", 3)
    several.take(Failed(7, "no memory", None))
    assert (first.phase, several.over) == ("failed", True)


def test_weights_are_read_once_for_all_of_a_pass() -> None:
    several = BatchMetrics((1, 2, 3, 4))
    for number in several.ids:
        several.take(delta(number, range(5), 4))
    assert several.weight_bytes_per_token == COST.weight_bytes / 4
    several.take(delta(1, range(5, 25), 1))  # the others have ended
    assert several.weight_bytes_per_token == COST.weight_bytes * (20 / 4 + 20) / 40


def test_speed_is_of_all_together_now_and_over_the_turn() -> None:
    several = BatchMetrics((1, 2))
    several.take(served(10.0, 0))
    assert several.rate_average is None
    for look in range(1, 9):
        several.take(served(10 + look * 0.5, 100 + (look - 1) * (50 if look < 5 else 10), (2, 2), n1="decode"))
    assert list(several.batches) == [2] * 16
    assert several.rate_now == pytest.approx(20)
    assert several.rate_average == pytest.approx((170 - 100) / 3.5)


def test_only_a_turn_of_several_has_them() -> None:
    metrics = LiveMetrics()
    feed(metrics, [Prefill(1, 0, 19, 0), delta(1, range(5), 1), done(1, 5)])
    assert metrics.batch is None
    assert metrics.document()["several"] is None
    metrics.begin_batch((2, 3))
    feed(metrics, [delta(2, range(3), 2), delta(3, range(3), 2)])
    assert (metrics.phase, metrics.running, len(metrics.turns)) == ("decode", None, 1)
    frozen = metrics.frozen()
    feed(metrics, [done(2, 3), done(3, 3, "cancelled"), served(2.0, 6)])
    assert metrics.phase == "idle"
    assert [row.phase for row in metrics.batch.rows] == ["done", "stopped"]  # type: ignore[attr-defined]
    assert [row.phase for row in frozen.batch.rows] == ["decode", "decode"]  # type: ignore[union-attr]
    metrics.begin_batch((4, 5))
    feed(metrics, [Died("killed")])
    assert metrics.phase == "dead"
    assert [row.phase for row in metrics.batch.rows] == ["failed", "failed"]  # type: ignore[attr-defined]
    feed(metrics, [Prefill(6, 0, 19, 0)])
    assert metrics.batch is None


@given(
    st.tuples(*[st.integers(0, 5000)] * 4),
    st.integers(4, 80),
    st.integers(1, 6),
)
def test_the_map_shows_every_kind_there_is(counts: tuple[int, int, int, int], width: int, height: int) -> None:
    lines = pool_map(counts, width, height)
    text = "".join(line.plain for line in lines)
    total = sum(counts)
    assert len(lines) <= height
    assert len(text) == min(total, width * height)
    if total <= width * height:
        assert [text.count(mark) for mark in "▓█▒·"] == list(counts)
    assert all(line.cell_length <= width for line in lines)
    shown = "".join(dict.fromkeys(text))
    assert shown in "▓█▒·" or all(mark in "▓█▒·" for mark in shown)
    assert list(shown) == sorted(shown, key="▓█▒·".index)


def test_the_parts_of_the_pool() -> None:
    assert parts(PoolStats(used=10, shared=4, cached=3, free=2)) == (4, 6, 3, 2)


def test_a_long_turn_fits_the_chart_from_its_first_pass_to_its_last() -> None:
    assert squeezed([8] * 50 + [2] * 50, 4) == [8, 8, 2, 2]
    assert squeezed([3, 1], 10) == [3, 1]
    assert len(squeezed(list(range(101)), 40)) == 40
