"""What a machine does at a moment, decoding and besides, and whether others take what decoding needs."""

from dataclasses import dataclass, field

from headrace.runtime.machine.sensors import Readings

_FULL = 0.9  # of the CPUs: from there on somebody waits
_NOTABLE = 0.15  # of the CPUs, taken by others while nothing is left
_MUCH = 0.5  # of the CPUs, taken by others: whoever begins to decode will wait


@dataclass(frozen=True, slots=True)
class Load:
    """One look. CPUs as a number of them at work; sizes in bytes; None where the machine does not say.

    own_cpus: of this program's processes. busiest: the name of the process that takes most, once that is known.
    """

    cpus: int
    busy_cpus: float
    own_cpus: float
    memory_used: int
    memory_total: int
    swap_used: int
    readings: Readings = field(default_factory=Readings)
    busiest: str = ""

    @property
    def other_cpus(self) -> float:
        """What other programs take, and other virtual machines."""
        return max(0.0, self.busy_cpus - self.own_cpus)

    @property
    def contended(self) -> bool:
        """Whether others take what decoding needs."""
        full = self.busy_cpus >= _FULL * self.cpus and self.other_cpus >= _NOTABLE * self.cpus
        return full or self.other_cpus >= _MUCH * self.cpus
