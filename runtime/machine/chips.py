"""Chip table: nominal memory bandwidth and compute by chip name, from `assets/chips.toml`.

The table is read at the first lookup, not at import.

A new chip is a row there, with its source; this module needs no change unless names are written in a new way.
tests/runtime/machine/test_chips.py looks every row up by names as drivers write them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.config.paths import ASSETS

_VENDORS = re.compile(r"^(Apple|NVIDIA GeForce|NVIDIA|Tesla)\s+")


class Chip(Struct, frozen=True):
    """One row of the table: vendor figures of one variant of a chip.

    name: as the driver reports it; `find` ignores vendor words.
    bandwidth: bytes per second.
    source: public page that states the bandwidth.
    gpu_cores, memory_gb: variants that the row covers; empty for every one of that name.
    max_memory_gb: the largest memory that is sold with it; None if not stated.
    fp16_flops: dense half-precision FLOP/s, on Apple's chips of the largest GPU; None if not stated.
    note: set by `find` where the row is not certain.
    """

    name: str
    bandwidth: float
    source: str
    gpu_cores: tuple[int, ...] = ()
    memory_gb: tuple[int, ...] = ()
    max_memory_gb: int | None = None
    fp16_flops: float | None = None
    note: str | None = None

    def with_cores(self, gpu_cores: int | None) -> "Chip":
        """Return the row with the FLOP/s of so many of its GPU cores."""
        if self.fp16_flops is None or not gpu_cores or gpu_cores not in self.gpu_cores:
            return self
        return replace(self, gpu_cores=(gpu_cores,), fp16_flops=self.fp16_flops * gpu_cores / max(self.gpu_cores))


def find(name: str, gpu_cores: int | None = None, memory_bytes: int | None = None) -> Chip | None:
    """Return the row for a driver's device name, or None.

    Names match whole ("RTX 4090" is not "RTX 4090 Laptop GPU"), ignoring case, vendor words and punctuation.
    If several variants match, the row with the lowest bandwidth is returned, with a `note`.
    """
    named = [chip for chip in table() if _key(chip.name) == _key(name)]
    if not named:
        return None
    fitting = [chip for chip in named if _covers(chip, gpu_cores, memory_bytes)]
    lowest = min(fitting or named, key=lambda chip: chip.bandwidth).with_cores(gpu_cores)
    if len(fitting) == 1:
        return lowest
    if not fitting:
        return replace(lowest, note="variant not in the table: the lowest figure for the name was taken")
    if any(chip.bandwidth != lowest.bandwidth for chip in fitting):
        return replace(lowest, note="variants of this chip differ: the lower figure was taken")
    return lowest


def without_vendor(name: str) -> str:
    """Return a chip's name without its vendor: "M4 Max" of "Apple M4 Max"."""
    return _VENDORS.sub("", name)


@lru_cache(maxsize=1)
def table() -> tuple[Chip, ...]:
    """Return all rows of the bundled table."""
    return load(ASSETS / "chips.toml")


def load(path: Path) -> tuple[Chip, ...]:
    """Read a chip table. Raises on a malformed one, which is a bug."""
    import tomllib  # not at import: many commands look nothing up

    with path.open("rb") as file:
        sections = tomllib.load(file)
    return tuple(
        Chip(
            name=row["name"],
            bandwidth=float(row["bandwidth_gb_s"]) * 1e9,
            source=row["source"],
            gpu_cores=tuple(row.get("gpu_cores", ())),
            memory_gb=tuple(row.get("memory_gb", ())),
            max_memory_gb=row.get("max_memory_gb"),
            fp16_flops=_fp16_flops(row),
        )
        for rows in sections.values()
        for row in rows
    )


def _fp16_flops(row: Mapping[str, Any]) -> float | None:
    if "gpu_mhz" in row:
        return float(max(row["gpu_cores"]) * row.get("gpu_flop", _FLOP) * row["gpu_mhz"]) * 1e6
    if "fp16_tflops" in row:
        return float(row["fp16_tflops"]) * 1e12
    return None


_FLOP = 256  # of an Apple GPU core in a cycle, before the M5
_VENDOR_WORDS = {"nvidia", "tesla", "geforce", "apple", "r", "tm"}


def _key(name: str) -> tuple[str, ...]:
    """Return the significant words of a name: `NVIDIA A100-SXM4-80GB` -> ("a100", "sxm4", "80gb")."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return tuple(word for word in words if word not in _VENDOR_WORDS)


def _covers(chip: Chip, gpu_cores: int | None, memory_bytes: int | None) -> bool:
    """Return whether the row fits all known facts of the machine."""
    if chip.gpu_cores and gpu_cores is not None and gpu_cores not in chip.gpu_cores:
        return False
    # Drivers report a little less than the marketed size, so sizes match within a gigabyte.
    return not (chip.memory_gb and memory_bytes is not None and not _near(memory_bytes / 2**30, chip.memory_gb))


def _near(gigabytes: float, sizes: Sequence[int]) -> bool:
    return any(size - 1 <= gigabytes <= size + 0.5 for size in sizes)
