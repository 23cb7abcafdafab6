"""Time of steps by part: sampled, within the step, off by default; facts of a pass in the records."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.network.decoder import Decoder
from headrace.runtime import ops
from headrace.runtime.engine import step_timer
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.engine.step_timer import StepTimer
from headrace.runtime.metrics.telemetry import StepRecord
from headrace.runtime.ops.native import RegionTimes
from tests.support.tiny import load_decoder, write_model

TIMES = st.builds(
    lambda computing_ns, waiting_ns: RegionTimes(1, computing_ns + waiting_ns, waiting_ns, 0),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)


@given(TIMES, TIMES, TIMES, st.floats(0, 2), st.floats(0, 1))
def test_timed_parts_of_a_step_sum_to_at_most_the_step(
    weights: RegionTimes, attention: RegionTimes, sampling: RegionTimes, seconds: float, host: float
) -> None:
    times = {"weights": weights, "attention": attention, "sampling": sampling}
    parts = step_timer._parts(times, seconds, host)
    assert parts is not None
    named = parts.named()
    assert step_timer._parts(times | {"weights": RegionTimes(0, 0, 0, 0)}, seconds, host) is None
    assert all(value >= 0 for value in named.values())
    assert sum(named.values()) <= seconds * (1 + 1e-9)
    if sum(of_kind.wall_ns for of_kind in times.values()) / 1e9 + host <= seconds:
        assert named["weights"] == (weights.wall_ns - weights.waiting_ns) / 1e9
        assert named["host"] == host


class Clocks:
    """Kernels' clocks that count how often they were started."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def measure_regions(self, on: bool) -> None:
        self.calls.append(on)

    def region_times(self) -> dict[str, RegionTimes]:
        return {"weights": RegionTimes(9, 5_000_000, 1_000_000, 0)}


@pytest.mark.parametrize(("every", "timed"), [(0, 0), (1, 19), (4, 7)])
def test_every_nth_step_is_timed(monkeypatch: pytest.MonkeyPatch, every: int, timed: int) -> None:
    clocks = Clocks()
    monkeypatch.setattr(ops, "native", clocks)
    monkeypatch.setattr(ops, "select", lambda: clocks)
    timer = StepTimer()
    timer.every = every
    found = [timer.parts(0.01, 0.0, decodes=True) for _ in range(20)]
    assert sum(parts is not None for parts in found) == timed
    assert all(parts.weights_s == 0.004 and parts.waiting_s == 0.001 for parts in found if parts)
    timer.every = 0
    timer.parts(0.01, 0.0, decodes=False)
    assert clocks.calls[-1:] == [False] * bool(every), "the clocks run on"
    before = len(clocks.calls)
    assert timer.parts(0.01, 0.0, decodes=True) is None
    assert len(clocks.calls) == before


def test_the_first_steps_of_each_answer_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(ops, "native", clocks)
    monkeypatch.setattr(ops, "select", lambda: clocks)
    timer = StepTimer()
    timer.every = 16
    for count, expected in ((40, [1, 2, 3, 4, 20, 36]), (6, [1, 2, 3, 4]), (1, [1])):
        timer.begin_answer()
        assert timer.parts(0.01, 0.0, decodes=False) is None
        timed = [step for step in range(1, count + 1) if timer.parts(0.01, 0.0, decodes=True) is not None]
        assert timed == expected
    timer.begin_answer()
    assert timer.parts(0.01, 0.0, decodes=True, follows=False) is None  # the whole prompt is cached
    assert timer.parts(0.01, 0.0, decodes=True) is not None
    assert timer.parts(0.01, 0.0, decodes=True, follows=False) is None, "the clocks ran in between"


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_records_have_the_parts_and_the_prompt_tokens_of_their_pass(tmp_path: Path, kernels: str) -> None:
    """A timed step of the kernels has parts; a step beside another sequence's prompt says how long that was."""
    network = load_decoder(
        write_model(tmp_path / "llama", "llama"), ops.native if kernels == "native" else ops.reference
    )
    engine = Engine(network, context_limit=400)
    engine.timer.every = 1
    first = engine.submit(Request([5, 17, 3], max_tokens=40))
    records = []
    joined = False
    while engine.has_work:
        for sequence, event in engine.step():
            if sequence is first and isinstance(event, Step):
                records.append(event.record)
        if len(records) > 10 and not joined:
            joined = True
            engine.submit(Request([7] * 90, max_tokens=2))
    assert sum(record.fed for record in records) == 89
    timed = [record for record in records if record.parts is not None]
    assert bool(timed) == (kernels == "native" and ops.select() is ops.native)
    assert all(record.fed == 0 for record in timed)
    assert all(record.parts.weights_s > 0 for record in timed)  # type: ignore[union-attr]


@pytest.mark.skipif(ops.select() is not ops.native, reason="only the CPU kernels have clocks")
def test_short_answers_have_timed_steps(tmp_path: Path) -> None:
    network = load_decoder(write_model(tmp_path / "llama", "llama"), ops.native)
    engine = Engine(network, context_limit=400)
    engine.timer.every = 16
    answers_with_times = 0
    for _ in range(10):
        records: list[StepRecord] = []
        engine.submit(Request([5, 17, 3], max_tokens=8))
        while engine.has_work:
            records += [event.record for _, event in engine.step() if isinstance(event, Step)]
        timed = {record.index for record in records if record.parts is not None}
        assert timed <= {1, 2, 3}
        answers_with_times += bool(timed)
    assert answers_with_times >= 5  # steps of a small model may end before the clocks start


def test_weight_parts_sum_to_the_weights_without_norms(either: Decoder) -> None:
    cost = either.cost
    parts = dict(cost.weight_parts)
    assert {"attention", "MLP", "head"} <= set(parts)
    norms = cost.weight_bytes - sum(parts.values())
    assert 0 < norms < 0.2 * cost.weight_bytes
