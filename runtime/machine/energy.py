"""Energy over a span of time, net of the idle machine's, and per token.

The counters are the machine's: other programs count, too. Unknown energy is None, never 0.

    sensors -> Readings -> EnergyMeter -> EnergyUse of a span -> per_token, less idle power -> TokenEnergy

An `Answer` and `bench` have a meter of their own; `LoadSampler` gives the energy between two samples.
tests/runtime/machine/test_energy.py turns the counters itself.
"""

import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from headrace.runtime.machine.sensors import Readings, Sensors

LEAST_S = 0.2  # seconds; shorter spans are a few updates of the counter
_SETTLE_S = 0.2  # seconds to wait until the machine is idle
_IDLE_S = 0.6  # seconds of the measurement of idle power: some more than LEAST_S
_Clock = Callable[[], float]


class EnergyUse(Struct, frozen=True):
    """Joules over a span. parts: the parts of the machine that the counter covers, see `Readings`."""

    joules: float
    seconds: float
    parts: str

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


class EnergyMeter:
    """Energy since the meter was made."""

    def __init__(self, sensors: Sensors, clock: _Clock = time.monotonic) -> None:
        self._sensors = sensors
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._began = self._clock(), self._sensors()

    def use(self) -> EnergyUse | None:
        """Return the energy so far; None for spans below LEAST_S, without a counter and after its reset."""
        began, before = self._began
        seconds = self._clock() - began
        after = self._sensors()
        if seconds < LEAST_S:
            return None
        return energy_between(before, after, seconds)


def energy_between(before: Readings, after: Readings, seconds: float) -> EnergyUse | None:
    """Return the energy between two readings; None without a counter and after its reset."""
    if before.joules is None or after.joules is None or after.joules < before.joules or seconds <= 0:
        return None
    return EnergyUse(after.joules - before.joules, seconds, after.energy_parts)


def idle_watts(sensors: Sensors, sleep: Callable[[float], None] = time.sleep) -> float | None:
    """Return the power while this program waits, over _IDLE_S; None, at once, without a counter."""
    if sensors().joules is None:
        return None
    sleep(_SETTLE_S)
    meter = EnergyMeter(sensors)
    sleep(_IDLE_S)
    use = meter.use()
    if use is None:
        return None
    return use.watts


class TokenEnergy(Struct, frozen=True):
    """Energy per token.

    joules: net of idle power; None if that is unknown or not below `watts`.
    whole_joules: with idle power.
    watts, idle_watts: mean power while the tokens were computed, and before.
    parts: of the machine, that were measured.
    """

    joules: float | None
    whole_joules: float
    watts: float
    idle_watts: float | None
    parts: str


def per_token(uses: Iterable[EnergyUse], tokens: int, idle: float | None) -> TokenEnergy | None:
    """Return the energy of each of `tokens` tokens that took all these spans; None without a span or token."""
    uses = list(uses)
    seconds = sum(use.seconds for use in uses)
    if not uses or not tokens or seconds <= 0:
        return None
    whole = sum(use.joules for use in uses)
    net = None
    if idle is not None and idle * seconds < whole:
        net = (whole - idle * seconds) / tokens
    return TokenEnergy(net, whole / tokens, whole / seconds, idle, uses[0].parts)
