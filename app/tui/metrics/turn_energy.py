"""Energy per token of the latest turn, net of the machine's idle power, from looks at the machine.

Idle power is the least of recent looks without steps or prefill. A look during which a prompt was computed does not
count: its energy is not that of output tokens.

`LiveMetrics` calls `look` with each sample of `MachineWatch`; the machine section shows `joules_per_token`.

Guard: tests/tui/decode/test_machine.py.
"""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the chat's first frame does not import sensors
    from headrace.runtime.machine.energy import EnergyUse

_LOOKS = 30  # without steps, that idle power is the least of


class TurnEnergy:
    """`look` once per look at the machine; `begin_turn` forgets the turn, not the idle power."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_LOOKS)  # watts
        self._net = 0.0  # joules of the turn
        self._tokens = 0

    def begin_turn(self) -> None:
        self._net = 0.0
        self._tokens = 0

    def look(self, use: "EnergyUse | None", tokens: int, *, fed: bool) -> None:
        """Note the energy since the last look, and the output tokens. fed: a prompt was computed meanwhile."""
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
        return self._net / self._tokens if self._tokens and self._net > 0 else None
