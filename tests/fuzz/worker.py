"""Fuzzing worker: runs the inputs of one target until the time is over and reports findings.

`python -m tests.fuzz.worker TARGET SEED FIRST SECONDS FOLDER`. Before each input it writes its number to FOLDER/at, so
that the driver can identify an input that kills or hangs it. Findings are lines of JSON on standard output.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import resource
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from headrace.runtime.errors import HeadraceError
from tests.fuzz.target import MAX_BYTES, MAX_MESSAGE, MAX_SECONDS, Target, chance_of, make_target
from tests.support.peak_memory import PeakMemory

_PAGE = os.sysconf("SC_PAGE_SIZE")
AT = struct.Struct("<qq")  # the input's number, those done
_STACKS_S = 50.0  # after so many of one input, or a few less, where every thread is goes to standard error
_ARMED_S = 5.0  # how often that is put off: each time takes a thread
_ADDRESS_SPACE = 4 << 30  # beyond what it has at the start: what asks for more gets a MemoryError, not the machine


def attempt(target: Target, given: Any) -> str | None:
    """Run one input; returns None or a finding, as lines of which the last is the summary."""
    memory = PeakMemory()
    before = time.process_time()
    try:
        target.run(given)
    except HeadraceError as error:
        if (problem := _unfit(error)) is not None:
            return problem
    except KeyboardInterrupt:
        raise
    except BaseException:
        return traceback.format_exc()
    seconds = time.process_time() - before
    if seconds > MAX_SECONDS:
        return f"it took {seconds:.1f} s of processor time"
    if (grown := memory.grown()) > MAX_BYTES:
        return f"it took {grown >> 20} MB of memory"
    return None


def _unfit(error: HeadraceError) -> str | None:
    """Return the fault of an error's message."""
    for words in (str(error), error.hint or ""):
        if "\n" in words or len(words) > MAX_MESSAGE:
            return f"{type(error).__name__} of {len(words)} characters, or of several lines: {words[:300]!a}"
        try:
            words.encode()
        except UnicodeEncodeError:
            return f"{type(error).__name__} that is no Unicode: {words[:300]!a}"
    return None


def main(name: str, seed: int, first: int, seconds: float, folder: Path) -> None:
    (folder / "at").write_bytes(bytes(AT.size))
    with (folder / "at").open("r+b") as file:
        at = mmap.mmap(file.fileno(), AT.size)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = make_target(name, Path(scratch))
        _bound_memory()
        until = time.monotonic() + seconds
        number = first
        done = 0
        armed = -_ARMED_S
        while time.monotonic() < until:
            AT.pack_into(at, 0, number, done)
            if (now := time.monotonic()) - armed >= _ARMED_S:
                faulthandler.dump_traceback_later(_STACKS_S)
                armed = now
            given = target.make(chance_of(name, seed, number))
            if (problem := attempt(target, given)) is not None:
                print(json.dumps({"number": number, "problem": problem}), flush=True)
            number = number + 1
            done = done + 1
        AT.pack_into(at, 0, number, done)
    os._exit(0)  # what hung on to threads is not waited for


def _bound_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * _PAGE + _ADDRESS_SPACE, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
