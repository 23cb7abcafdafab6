"""Energy per token of the latest turn, net of the machine's idle power, from samples of the machine's energy.

Idle power is the least of recent samples without steps or prefill. A sample during which a prompt was computed does not
count: its energy is not that of output tokens.

Guard: tests/tui/decode/test_machine.py.
"""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the chat's first frame does not import sensors
    from headrace.runtime.machine.energy import EnergyUse

_IDLE_SAMPLES = 30  # latest samples without steps; idle power is their least


class TurnEnergy:
    """Sums of a turn, and the idle power, which `begin_turn` keeps."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_IDLE_SAMPLES)  # watts
        self._net = 0.0  # joules of the turn
        self._tokens = 0

    def begin_turn(self) -> None:
        self._net = 0.0
        self._tokens = 0

    def add_sample(self, use: "EnergyUse | None", tokens: int, *, fed: bool) -> None:
        """Add a sample.

        use: energy since the last sample; None if the machine reports none.
        tokens: output tokens since then.
        fed: a prompt was computed since then.
        """
        if use is None or fed:
            return
        if not tokens:
            self._idle.append(use.watts)
        elif self.idle_watts is not None:
            self._net += use.joules - self.idle_watts * use.seconds
            self._tokens += tokens

    @property
    def idle_watts(self) -> float | None:
        return min(self._idle, default=None)

    @property
    def joules_per_token(self) -> float | None:
        """Net of idle power; None if unknown."""
        if not self._tokens or self._net <= 0:
            return None
        return self._net / self._tokens
