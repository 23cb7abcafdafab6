"""Joining the ring: it holds up everything else in a process, so it ends in time and by Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.rank_process import hostfile

_JOIN = """
import signal, sys
from headrace.runtime.ranks import group
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
group.JOIN_S = int(sys.argv[1])
print("joining", flush=True)
group.Group.join("127.0.0.1", others="rank 1 (mac2)")
"""


def joining(folder: Path, rank: int, seconds: int) -> "subprocess.Popen[str]":
    """Start a process that joins a ring alone, and wait for its guard."""
    made = subprocess.Popen(
        [sys.executable, "-c", _JOIN, str(seconds)],
        env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile(folder / "hosts.json", 2))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "joining\n"
    return made


def guards(pid: int) -> list[psutil.Process]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if len(found := psutil.Process(pid).children(recursive=True)) == 4:  # shell, its copy, sleep, cat
            return found
        time.sleep(0.01)
    raise AssertionError("no guard")


@pytest.mark.sampled
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGINT), (0, signal.SIGTERM)])
def test_a_signal_while_ranks_join_ends_all_processes(tmp_path: Path, rank: int, number: signal.Signals) -> None:
    """The first rank accepts, the last connects. Python handles the signal before."""
    process = joining(tmp_path, rank, seconds=int(10 * PATIENCE_S))
    found = guards(process.pid)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -number  # shells show 130 for Ctrl-C
    assert not psutil.wait_procs(found, PATIENCE_S)[1]


def test_a_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    process = joining(tmp_path, 0, seconds=1)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "rank 1 (mac2) did not connect in 1 s" in errors
