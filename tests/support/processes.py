"""Search for processes that a test started indirectly (Linux only), and waits for their state."""

import time
from pathlib import Path

import psutil

from tests.support.patience import PATIENCE_S


def wait_until_asleep(pid: int) -> None:
    """Wait until a process that has shown a prompt waits for its answer.

    Python loses no signal, but one between its last check and the call that reads is handled after that call.
    """
    process = psutil.Process(pid)
    end = time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < end
        time.sleep(0.001)


def engines(home: Path) -> list[int]:
    """Return the engine processes with this HEADRACE_HOME."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"app/engine/start.py" in (entry / "cmdline").read_bytes():
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"HEADRACE_HOME={home}".encode() in environment:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found
