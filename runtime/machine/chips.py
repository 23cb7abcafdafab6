"""Nominal memory bandwidth by chip name: typed access to `assets/chips.toml`.

Knows names and numbers, never the machine: `runtime.machine.hardware` asks the machine and looks the answer up here.
The table is read on the first lookup, not on import, so it costs a cold start nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from headrace.runtime.config.paths import ASSETS


@dataclass(frozen=True)
class Chip:
    """One row of the table: what the vendor says about one variant of a chip.

    `bandwidth` is in bytes per second, `fp16_flops` in dense half-precision FLOP/s (None: not stated).
    `gpu_cores` and `memory_gb` list the variants the row covers; empty means every variant of that name.
    """

    name: str
    bandwidth: float
    source: str
    gpu_cores: tuple[int, ...] = ()
    memory_gb: tuple[int, ...] = ()
    max_memory_gb: int | None = None
    fp16_flops: float | None = None
    note: str | None = None


def find(name: str, gpu_cores: int | None = None, memory_bytes: int | None = None) -> Chip | None:
    """The row for a device name as the driver reports it, or None when the table does not know it.

    Names match whole ("RTX 4090" is not "RTX 4090 Laptop GPU"), ignoring case, vendor words and punctuation.
    If the variant stays open, the row with the lowest bandwidth is returned with a `note` that says so.
    """
    named = [chip for chip in table() if _key(chip.name) == _key(name)]
    if not named:
        return None
    fitting = [chip for chip in named if _covers(chip, gpu_cores, memory_bytes)]
    lowest = min(fitting or named, key=lambda chip: chip.bandwidth)
    if len(fitting) == 1:
        return lowest
    if not fitting:
        return replace(lowest, note="variant not in the table: the lowest figure for the name was taken")
    if any(chip.bandwidth != lowest.bandwidth for chip in fitting):
        return replace(lowest, note="variants of this chip differ: the lower figure was taken")
    return lowest


@lru_cache(maxsize=1)
def table() -> tuple[Chip, ...]:
    """All rows of the bundled table."""
    return load(ASSETS / "chips.toml")


def load(path: Path) -> tuple[Chip, ...]:
    """Read a chip table; raises on a malformed one (it is our own file, so that is a bug)."""
    import tomllib  # only here: a lookup may never happen

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
            fp16_flops=float(row["fp16_tflops"]) * 1e12 if "fp16_tflops" in row else None,
        )
        for rows in sections.values()
        for row in rows
    )


_VENDOR_WORDS = {"nvidia", "tesla", "geforce", "apple", "r", "tm"}


def _key(name: str) -> tuple[str, ...]:
    """A name as its telling words: `NVIDIA A100-SXM4-80GB` -> ("a100", "sxm4", "80gb")."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return tuple(word for word in words if word not in _VENDOR_WORDS)


def _covers(chip: Chip, gpu_cores: int | None, memory_bytes: int | None) -> bool:
    """Whether nothing known about the machine speaks against this row."""
    if chip.gpu_cores and gpu_cores is not None and gpu_cores not in chip.gpu_cores:
        return False
    # Drivers report a little less than the marketed size, so sizes match within a gigabyte.
    return not (chip.memory_gb and memory_bytes is not None and not _near(memory_bytes / 2**30, chip.memory_gb))


def _near(gigabytes: float, sizes: Sequence[int]) -> bool:
    return any(size - 1 <= gigabytes <= size + 0.5 for size in sizes)
