"""Figures from clock readings: on made-up timelines, every one of them is known beforehand."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.metrics.cost import LayerKV, StepCost
from headrace.runtime.metrics.telemetry import MBU, Percentiles, StepRecord, Summary, mbu

COST = StepCost(weight_bytes=1_000_000, weight_flops=0, kv=[LayerKV(4, 100), LayerKV(2, 100, window=10)])
PROMPT = 8


class CountedCache(KVCache):
    """A cache of lengths only; 600 bytes an entry, room for 32."""

    @property
    def committed_bytes(self) -> int:
        return 600 * self.committed

    allocated_bytes = 600 * 32


def run(submitted: float, prefilled: float, ready: Iterable[float]) -> tuple[Summary, list[StepRecord]]:
    """A generation whose clock reads exactly these times."""
    times = list(ready)
    clock = iter([submitted, prefilled, *times])
    records: list[StepRecord] = []
    timeline = Timeline(cost=COST, prompt_tokens=PROMPT, clock=lambda: next(clock))
    cache: Any = CountedCache(limit=10_000)
    cache.advance(PROMPT - 1)
    cache.commit(PROMPT - 1)
    timeline.prefilled()
    for _ in times:
        cache.advance(1)
        cache.commit(1)
        records.append(timeline.step_done(cache))
    return timeline.summary(cache, len(times)), records


def test_summary_figures_of_a_known_timeline_equal_those_by_hand() -> None:
    summary, records = run(100.0, 100.7, [101.0, 101.1, 101.3, 101.4, 101.8])
    assert summary.prefill_s == pytest.approx(0.7)
    assert summary.first_step_s == pytest.approx(0.3)
    assert summary.prefill_tokens_per_second == pytest.approx(7 / 0.7)  # the first step feeds the eighth
    assert summary.tpot_s == pytest.approx(0.8 / 4)  # four intervals between five tokens
    assert summary.decode_tokens_per_second == pytest.approx(5.0)
    itl = summary.itl
    assert itl is not None
    assert (itl.p50, itl.max) == (pytest.approx(0.15), pytest.approx(0.4))
    assert itl.p95 == pytest.approx(0.2 + 0.85 * 0.2)  # rank 2.85 of 0.1 0.1 0.2 0.4
    assert [record.latency_s for record in records] == pytest.approx([0.3, 0.1, 0.2, 0.1, 0.4])


def test_a_step_of_several_tokens_gives_each_its_part() -> None:
    times = iter([0.0, 1.0, 1.5, 1.9, 2.0])
    timeline = Timeline(cost=COST, prompt_tokens=PROMPT, clock=lambda: next(times))
    cache: Any = CountedCache(limit=100)
    cache.advance(PROMPT - 1)
    cache.commit(PROMPT - 1)
    timeline.prefilled()
    records = []
    for tokens, proposed in ((1, 0), (4, 5), (2, 3)):
        cache.advance(proposed + 1)
        cache.commit(tokens)
        cache.rollback()
        records.append(timeline.step_done(cache, tokens=tokens, proposed=proposed, source="ngram"))
    summary = timeline.summary(cache, 7)
    assert (summary.steps, summary.proposed, summary.accepted) == (3, 8, 4)
    assert summary.tpot_s == pytest.approx(0.5 / 6)
    assert summary.step_s == pytest.approx(0.25)
    assert summary.step_latency is not None
    assert summary.itl is not None
    assert summary.step_latency.max == pytest.approx(0.4)
    assert (summary.itl.p50, summary.itl.max) == (pytest.approx(0.1), pytest.approx(0.1))
    assert [(record.tokens, record.accepted, record.proposed) for record in records] == [
        (1, 0, 0),
        (4, 3, 5),
        (2, 1, 3),
    ]
    rows = PROMPT + 6  # what the five guesses and the token before them attend to
    assert records[1].kv_bytes_read == 400 * rows + 200 * min(rows, 10)
    assert records[1].kv_bytes_written == 6 * 600
    timeline.discard_tokens(1)
    assert timeline.summary(cache, 6).tpot_s == pytest.approx(0.5 / 5)


def test_a_step_whose_tokens_are_all_discarded_has_no_accepted_drafts() -> None:
    timeline = Timeline(cost=COST, prompt_tokens=PROMPT)
    cache: Any = CountedCache(limit=100)
    cache.advance(PROMPT - 1)
    cache.commit(PROMPT - 1)
    timeline.prefilled()
    for _ in range(2):
        cache.advance(1)
        cache.commit(1)
        timeline.step_done(cache, tokens=1)
    timeline.discard_tokens(1)
    summary = timeline.summary(cache, 1)
    assert (summary.steps, summary.accepted) == (2, 0)


def test_achieved_bandwidth_leaves_out_the_first_step() -> None:
    summary, records = run(0.0, 1.0, [51.0, 51.5, 52.0])
    assert summary.achieved_gb_s == pytest.approx((records[1].step_bytes + records[2].step_bytes) / 1.0 / 1e9)


def test_step_bytes_count_used_entries_up_to_the_window() -> None:
    _, records = run(0.0, 1.0, [2.0 + i for i in range(5)])
    for past, record in enumerate(records, start=PROMPT - 1):
        rows = past + 1
        assert record.context == rows
        assert record.kv_bytes_read == 400 * rows + 200 * min(rows, 10)
        assert record.kv_bytes_written == 600
        assert record.step_bytes == 1_000_000 + record.kv_bytes_read + 600 == COST.step_bytes(past)
        assert record.achieved_gb_s == pytest.approx(record.step_bytes / 1e9)
        assert (record.kv_used_bytes, record.kv_allocated_bytes) == (600 * rows, 600 * 32)


def test_figures_that_need_more_steps_are_absent() -> None:
    none, _ = run(0.0, 1.0, [])
    assert (none.first_step_s, none.itl, none.tpot_s, none.achieved_gb_s) == (None,) * 4
    one, _ = run(0.0, 1.0, [1.5])
    assert (one.first_step_s, one.itl, one.tpot_s, one.decode_tokens_per_second) == (0.5, None, None, None)


def test_equal_clock_readings_cause_no_division_by_zero() -> None:
    summary, records = run(5.0, 5.0, [5.0, 5.0])
    assert (summary.achieved_gb_s, summary.decode_tokens_per_second, summary.prefill_tokens_per_second) == (None,) * 3
    assert [record.achieved_gb_s for record in records] == [0.0, 0.0]


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=60))
def test_summary_agrees_with_its_records(gaps: list[float]) -> None:
    ready = []
    now = 2.0
    for gap in gaps:
        now += gap
        ready.append(now)
    summary, records = run(1.0, 2.0, ready)
    latencies = [record.latency_s for record in records]
    assert sum(latencies) == pytest.approx(ready[-1] - 2.0)
    assert summary.steps == len(gaps)
    if len(gaps) > 1:
        assert summary.tpot_s == pytest.approx(sum(latencies[1:]) / (len(gaps) - 1))
        assert summary.itl is not None
        assert summary.itl.max == max(latencies[1:])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    import numpy as np

    found = Percentiles.of(values)
    assert found is not None
    assert [found.p50, found.p95, found.p99, found.max] == pytest.approx(
        np.percentile(values, [50, 95, 99, 100]).tolist(), rel=1e-9, abs=1e-9
    )


def test_an_empty_series_has_no_percentiles() -> None:
    assert Percentiles.of([]) is None


def test_mbu_needs_achieved_and_peak_bandwidth() -> None:
    assert mbu(27.0, None, 54.0) == MBU(0.5, 54.0, measured_beside=False)
    assert mbu(27.0, 54.0, 90.0) == MBU(0.5, 54.0, measured_beside=True)
    assert mbu(27.0, 20.0, 54.0) == MBU(0.5, 54.0, measured_beside=False)  # a reading slower than the steps
    unknown = mbu(None, None, 54.0), mbu(27.0, None, None), mbu(27.0, None, 0.0), mbu(27.0, 54.0, 90.0, busy=True)
    assert [found.share for found in unknown] == [None] * 4
