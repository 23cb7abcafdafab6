"""Chip names as users write them: `M4 Max (40-core)`, `m4max`, `4090`, `rtx 3080 ti`.

Case, spaces and vendor words do not matter. An ambiguous name is an error that lists the candidates. A chip sold with
several bandwidths gives one target each. A chip that no table has is given by figures: `1100 GB/s, 40 TFLOP/s`.

Guard: tests/app/predict/test_predict.py.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from headrace.app.predict.prediction import LARGE_MAC_SHARE, SMALL_MAC_GB, SMALL_MAC_SHARE, TargetMachine
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.chips import Chip, table, without_vendor

_VENDOR_WORDS = {"apple", "nvidia", "geforce", "tesla"}
# Examples of each pattern: "(40-core)" or "40 GPU cores"; "1100 GB/s, 40 TFLOP/s"; "2x M3 Ultra 256 GB".
_CORES = re.compile(r"\(?\b(\d+)[- ]*(?:gpu[- ]*)?cores?\b\)?", re.IGNORECASE)
_FIGURES = re.compile(r"(\d+(?:\.\d+)?)\s*GB/s(?:[\s,]+(\d+(?:\.\d+)?)\s*TFLOP/?S)?", re.IGNORECASE)
_MACHINE = re.compile(r"(?:(?P<count>\d+)\s*x\s+)?(?P<chip>.+?)(?:[\s,]+(?P<memory>\d+)\s*GB)?", re.IGNORECASE)
MAX_MACHINES = 16  # of --hosts
_LIST = '`headrace predict --list-chips` lists all; figures do as well: "1100 GB/s, 40 TFLOP/s"'


def chip_targets(text: str, memory_gb: int | None = None) -> list[TargetMachine]:
    """Return every variant of the named chip, slowest first. Raises UsageError for unknown or ambiguous names."""
    figures = _FIGURES.fullmatch(text.strip())
    if figures is not None and float(figures[1]) > 0:
        usable = None
        if memory_gb is not None:
            usable = usable_bytes(memory_gb, apple=False)
        flops = float(figures[2]) * 1e12 if figures[2] else None
        return [TargetMachine(" ".join(text.split()), float(figures[1]) * 1e9, usable, apple=False, flops=flops)]
    stated = _CORES.search(text)
    cores = int(stated[1]) if stated else None
    name = _named(_CORES.sub(" ", text).strip(), text.strip())
    rows = [chip for chip in table() if chip.name == name]
    fitting = [chip for chip in rows if not (cores and chip.gpu_cores) or cores in chip.gpu_cores]
    if not fitting:
        sold = sorted({count for chip in rows for count in chip.gpu_cores})
        raise UsageError(f"the {without_vendor(name)} has {_any_of(map(str, sold))} GPU cores, not {cores}")
    sized = [chip for chip in fitting if memory_gb is None or _is_sold_with(chip, memory_gb)]
    return [_target(chip, cores, memory_gb) for chip in sorted(sized or fitting, key=lambda chip: chip.bandwidth)]


def _is_sold_with(chip: Chip, memory_gb: int) -> bool:
    """Return whether the vendor sells the variant with so much memory; True where the table does not say."""
    if chip.memory_gb:
        return memory_gb in chip.memory_gb
    return chip.max_memory_gb is None or memory_gb <= chip.max_memory_gb


def machine_targets(text: str, memory_gb: int | None = None) -> list[TargetMachine]:
    """Return the machines of a list such as `M4 Max, 2x M3 Ultra 256 GB`; the fastest variant of an open name.

    memory_gb: of machines without a size of their own. Raises UsageError.
    """
    targets: list[TargetMachine] = []
    for name in text.split(","):
        shown = _MACHINE.fullmatch(name.strip())
        count = 0
        if shown is not None:
            count = int(shown["count"] or 1)
        if shown is None or not 1 <= count <= MAX_MACHINES:
            raise UsageError(
                f"--hosts: {name.strip()!r} is no machine", 'machines look like "M4 Max,2x M3 Ultra 256 GB"'
            )
        size = int(shown["memory"]) if shown["memory"] else memory_gb
        targets += [chip_targets(shown["chip"], size)[-1]] * count
    if not 2 <= len(targets) <= MAX_MACHINES:
        raise UsageError(f"--hosts takes 2 to {MAX_MACHINES} machines, not {len(targets)}")
    return targets


def known_targets(memory_gb: int | None = None) -> list[TargetMachine]:
    """Return every Apple chip of the table, with its largest memory unless given."""
    return [_target(chip, None, memory_gb) for chip in table() if chip.name.startswith("Apple")]


def usable_bytes(gigabytes: int, *, apple: bool) -> int:
    """Return the bytes for weights and cache in so much memory."""
    share = 0.95  # the rest is left to other programs, as in `runtime.machine.memory`
    if apple:
        share = LARGE_MAC_SHARE
        if gigabytes <= SMALL_MAC_GB:
            share = SMALL_MAC_SHARE
    return int(gigabytes * 2**30 * share)


def _named(wanted: str, shown: str) -> str:
    """Return the one name of the table that `wanted` matches."""
    names = list(dict.fromkeys(chip.name for chip in table()))
    squashed = {name: "".join(_words(name)) for name in names}
    if matches := [name for name in names if squashed[name] == "".join(_words(wanted))]:
        return matches[0]
    words = set(_words(wanted))
    partial = [name for name in names if words and words <= set(_words(name))]
    shortest = min(partial, key=lambda name: len(squashed[name]), default="")
    if partial and all(name.startswith(shortest) for name in partial):  # the others are variants of that one
        return shortest
    if partial:
        raise UsageError(
            f"{shown!r} is ambiguous: {_any_of(map(without_vendor, partial))}", f"give more of the name; {_LIST}"
        )
    near = get_close_matches("".join(_words(wanted)), squashed.values(), n=3, cutoff=0.5)
    close = [without_vendor(name) for squash in near for name in names if squashed[name] == squash]
    hint = _LIST
    if close:
        hint = f"similar: {_any_of(close)}; {_LIST}"
    raise UsageError(f"the chip table has no {shown!r}", hint)


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in _VENDOR_WORDS]


def _any_of(names: "Sequence[str] | map[str]") -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _target(chip: Chip, cores: int | None, memory_gb: int | None) -> TargetMachine:
    apple = chip.name.startswith("Apple")
    gigabytes = memory_gb or chip.max_memory_gb or max(chip.memory_gb, default=None)
    usable = None
    if gigabytes is not None:
        usable = usable_bytes(gigabytes, apple=apple)
    name = f"{without_vendor(chip.name)}{_variant(chip, cores)}"
    return TargetMachine(name, chip.bandwidth, usable, apple, flops=chip.with_cores(cores).fp16_flops)


def _variant(chip: Chip, cores: int | None) -> str:
    """Return the suffix that distinguishes the variant: GPU cores or memory."""
    if chip.gpu_cores and cores:
        return f" ({cores}-core)"
    if not any(other.name == chip.name and other is not chip for other in table()):
        return ""
    if chip.gpu_cores:
        return f" ({'/'.join(map(str, chip.gpu_cores))}-core)"
    if chip.memory_gb:
        return f" ({'/'.join(map(str, chip.memory_gb))} GB)"
    return ""
