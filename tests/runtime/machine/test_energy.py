"""Energy of spans and tokens, from counters that a test turns."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.runtime.machine.energy import LEAST_S, EnergyMeter, EnergyUse, idle_watts, per_token
from headrace.runtime.machine.sensors import Readings


class Counter:
    """A counter and a clock: `watts` flow while time passes."""

    def __init__(self, watts: float = 3.0) -> None:
        self.joules = 1000.0
        self.now = 50.0
        self.watts = watts

    def __call__(self) -> Readings:
        return Readings(joules=self.joules, energy_parts="CPU")

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.joules += self.watts * seconds


def test_a_meter_counts_from_its_beginning() -> None:
    counter = Counter()
    counter.sleep(9.0)
    meter = EnergyMeter(counter, counter.clock)
    counter.sleep(LEAST_S / 2)
    assert meter.use() is None  # too short
    counter.watts = 20.0
    counter.sleep(2.0)
    use = meter.use()
    assert use is not None
    assert (use.joules, use.seconds, use.parts) == (pytest.approx(40.0 + 0.3), pytest.approx(2.1), "CPU")
    counter.joules = 5.0
    assert meter.use() is None  # the counter began anew


def test_without_a_counter_there_is_no_energy_and_no_wait() -> None:
    slept: list[float] = []
    counter = Counter()
    assert EnergyMeter(Readings, counter.clock).use() is None
    assert idle_watts(Readings, slept.append) is None
    assert slept == []


def test_idle_power_is_read_from_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(2.5)
    monkeypatch.setattr(EnergyMeter.__init__, "__defaults__", (counter.clock,))
    assert idle_watts(counter, counter.sleep) == pytest.approx(2.5)


def test_energy_of_a_token_is_net_of_idle_power() -> None:
    uses = [EnergyUse(30.0, 2.0, "CPU"), EnergyUse(20.0, 3.0, "CPU")]
    found = per_token(uses, 100, 4.0)
    assert found is not None
    assert (found.joules, found.whole_joules, found.watts) == pytest.approx((0.3, 0.5, 10.0))
    unknown = per_token(uses, 100, None)
    assert unknown is not None
    assert unknown.joules is None  # not the whole of it
    cold = per_token(uses, 100, 11.0)
    assert cold is not None
    assert cold.joules is None  # idle was measured while something else ran


@pytest.mark.parametrize(("uses", "tokens"), [([], 10), ([EnergyUse(1.0, 1.0, "")], 0), (iter(()), 3)])
def test_no_span_or_token_has_no_energy(uses: Any, tokens: int) -> None:
    assert isinstance(uses, list | Iterator)
    assert per_token(uses, tokens, 1.0) is None
