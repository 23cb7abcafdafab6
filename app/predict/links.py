"""Links between machines (assets/links.toml): latency, bandwidth, and times of collectives over them.

A ring's all_sum of N ranks is 2 (N - 1) messages of 1/N of the array, one after the other (MLX's ring backend), or
N - 1 of the whole array if it is gathered and added (`runtime.ranks.group`). In a mesh every rank sends the whole array
to all others at once (MLX's JACCL backend).

Guard: tests/app/predict/test_hosts.py.
"""

import tomllib
from functools import cache

from msgspec import Struct

from headrace.runtime.config.paths import ASSETS
from headrace.runtime.config.typed import typed


class NetworkLink(Struct, frozen=True):
    """A network between machines.

    name: as after --link.
    title: for people.
    latency: of a message, in seconds.
    bandwidth: bytes per second.
    mesh: largest number of ranks that form a mesh; 0: they always form a ring.
    thunderbolt5: only chips of `has_thunderbolt5` have it.
    source: of the figures.
    gathers: sums of a ring are gathered where that is faster.
    """

    name: str
    title: str
    latency: float
    bandwidth: float
    mesh: int
    thunderbolt5: bool
    source: str
    gathers: bool = False

    def send_s(self, nbytes: float) -> float:
        """Return the time of one message."""
        return self.latency + nbytes / self.bandwidth

    def all_sum_s(self, nbytes: float, ranks: int) -> float:
        """Return the time in which all ranks get the sum of their arrays of `nbytes`."""
        if ranks <= self.mesh:
            return self.send_s(nbytes)
        ring_s = 2 * (ranks - 1) * self.send_s(nbytes / ranks)
        if self.gathers:
            return min(ring_s, (ranks - 1) * self.send_s(nbytes))
        return ring_s

    def all_gather_s(self, nbytes: float, ranks: int) -> float:
        """Return the time in which all ranks get the parts of an array of `nbytes`."""
        return (1 if ranks <= self.mesh else ranks - 1) * self.send_s(nbytes / ranks)


class _LinkRow(Struct):
    title: str
    latency_us: float
    gb_s: float
    mesh: int
    thunderbolt5: bool
    source: str


class _ChipNames(Struct):
    chips: list[str]


class _LinksFile(Struct):
    """assets/links.toml."""

    links: dict[str, _LinkRow]
    thunderbolt5: _ChipNames


@cache
def links() -> dict[str, NetworkLink]:
    """Return every kind of link by name, fastest first."""
    return {
        name: NetworkLink(
            name=name,
            title=row.title,
            latency=row.latency_us * 1e-6,
            bandwidth=row.gb_s * 1e9,
            mesh=row.mesh,
            thunderbolt5=row.thunderbolt5,
            source=row.source,
            gathers=not row.mesh,
        )
        for name, row in _file().links.items()
    }


def has_thunderbolt5(chip: str) -> bool:
    """Return whether Macs with this chip have Thunderbolt 5."""
    return f"Apple {chip.split(' (')[0]}" in _file().thunderbolt5.chips


@cache
def _file() -> _LinksFile:
    with (ASSETS / "links.toml").open("rb") as file:
        return typed(_LinksFile, tomllib.load(file))
