"""CPU and memory load of the machine, and contention with decoding."""

from dataclasses import dataclass, field

from headrace.runtime.machine.energy import EnergyUse
from headrace.runtime.machine.sensors import Readings

_FULL = 0.9  # share of the CPUs from which processes wait
_NOTABLE = 0.15  # share of other programs that counts while the CPUs are full
_MUCH = 0.5  # share of other programs that always counts


@dataclass(frozen=True, slots=True)
class CPUUse:
    """CPUs in use, as the number busy. own_cpus: with this program's processes."""

    cpus: int
    busy_cpus: float
    own_cpus: float

    @property
    def other_cpus(self) -> float:
        """CPUs busy with other programs and virtual machines."""
        return max(0.0, self.busy_cpus - self.own_cpus)

    @property
    def contended(self) -> bool:
        """True if other programs slow decoding down."""
        full = self.busy_cpus >= _FULL * self.cpus and self.other_cpus >= _NOTABLE * self.cpus
        return full or self.other_cpus >= _MUCH * self.cpus


@dataclass(frozen=True, slots=True)
class Load(CPUUse):
    """One sample of the load. Sizes in bytes. busiest: the busiest other process, empty if not known yet.

    energy: since the last sample; None if unknown.
    """

    memory_used: int
    memory_total: int
    swap_used: int
    readings: Readings = field(default_factory=Readings)
    busiest: str = ""
    energy: EnergyUse | None = None
