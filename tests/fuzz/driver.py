"""The fuzzing driver: targets run in children; a dead or hanging child is a finding, and another one continues."""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.target import chance_of, make_target
from tests.fuzz.worker import AT

ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 60.0  # without an end to one input, on however busy a machine
STARTS_S = 120.0
# Where targets write: where there is one, a file system in memory, since what is synced to a disk is waited for.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_SAVED = 3  # inputs of each kind of problem
_OUR_FRAME = re.compile(r'File "[^"]*?/((?:app|models|runtime|tests)/[^"]+)", line (\d+)')


@dataclass
class Report:
    """Result of one target. problems: counts by last line and location."""

    name: str
    seed: int
    inputs: int = 0
    seconds: float = 0.0
    problems: Counter[str] = field(default_factory=Counter)


def fuzz(names: Sequence[str], *, seed: int, seconds: float, jobs: int, saved: Path) -> Iterator[Report]:
    """Run these targets for so many seconds altogether, `jobs` at a time; returns their reports in order."""
    each = seconds * min(jobs, len(names)) / len(names)
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda name: _fuzz_one(name, seed, each, saved), names)


def _fuzz_one(name: str, seed: int, seconds: float, saved: Path) -> Report:
    report = Report(name, seed)
    until = time.monotonic() + seconds
    first = 0
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-", dir=IN_MEMORY) as folder:
        while (left := until - time.monotonic()) > 0:
            child = _Child(name, seed, first, left, Path(folder))
            how = child.wait(lambda number, problem: _note(report, number, problem, saved))
            number, done = child.at
            report.inputs += done
            if how is None:
                break
            _note(report, number, how, saved)
            if "before its first input" in how:
                break
            first = number + 1
    report.seconds = seconds - max(0.0, until - time.monotonic())
    return report


class _Child:
    """One worker."""

    def __init__(self, name: str, seed: int, first: int, seconds: float, folder: Path) -> None:
        self._place = folder / "at"
        self._place.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.worker", name, str(seed), str(first), str(seconds), str(folder)]
        # Unbuffered bytes of what it wrote last, which says how a native library ended it.
        self._errors = (folder / "stderr").open("w+b")
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._errors)

    @property
    def at(self) -> tuple[int, int]:
        try:
            number, done = AT.unpack(self._place.read_bytes())
        except (OSError, struct.error):
            return 0, 0
        return number, done

    def wait(self, found: Any) -> str | None:
        """Wait for the end, passing findings to `found`. Returns None or the kind of death."""
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line) if line.startswith(b"{") else None
            if told:
                found(told["number"], told["problem"])
        self._process.stdout.close()
        code = self._process.wait()
        watch.join()
        self._errors.seek(0)
        last = self._errors.read()[-3000:].decode("utf-8", "replace")
        self._errors.close()
        if code == 0:
            return None
        begun = self._place.exists() and (self.at[1] > 0 or self._killed is None)
        where = "" if begun else " before its first input"
        return f"{last}\n{self._killed or f'the process ended with {code}{where}'}"

    _killed: str | None = None

    def _watch(self) -> None:
        seen = (-1, -1)
        since = time.monotonic()
        while self._process.poll() is None:
            if (now := self.at) != seen:
                seen = now
                since = time.monotonic()
            elif time.monotonic() - since > (HANGS_S if self._place.exists() else STARTS_S):
                self._killed = f"it had no end after {HANGS_S:.0f} s"
                self._process.kill()
            time.sleep(0.1)


def kind_of(problem: str) -> str:
    """Return the kind of a problem: the type in its last line, and the last location in our code."""
    last = problem.strip().splitlines()[-1]
    frames = _OUR_FRAME.findall(problem)
    place = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return re.sub(r"\d+(\.\d+)?", "N", last.split(":")[0])[:120] + place


def _note(report: Report, number: int, problem: str, saved: Path) -> None:
    kind = kind_of(problem)
    report.problems[kind] += 1
    if report.problems[kind] > _SAVED:
        return
    saved.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            given = make_target(report.name, Path(scratch)).make(chance_of(report.name, report.seed, number))
    except Exception as error:  # the target itself is what failed
        given = error
    again = f"python -m tests.fuzz {report.name} --seed {report.seed} --only {number}"
    text = f"{again}\n\n{problem.rstrip()}\n\n{given!r}\n"
    (saved / f"{report.name}-{report.seed}-{number}.txt").write_text(text, "utf-8", "backslashreplace")
