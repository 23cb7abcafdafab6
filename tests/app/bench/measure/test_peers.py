"""Peers in other processes end with the benchmark, whenever that ends."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

from headrace.app.bench.measure import peers
from headrace.app.bench.measure.child_process import ChildProcess

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


def test_an_interrupted_start_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupted(self: ChildProcess) -> None:
        started.append(self._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ChildProcess("peer", "model", SLEEPER)
    assert [process.returncode is not None for process in started] == [True]


def test_peers_that_are_open_are_closed_when_opening_another_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ChildProcess] = []

    def second_is_interrupted(*_: object) -> tuple[ChildProcess, str]:
        if opened:
            raise KeyboardInterrupt
        opened.append(ChildProcess("peer", "model", [sys.executable, "-c", "print('{}'); input()"]))
        return opened[0], "a line"

    monkeypatch.setitem(peers.OPENERS, "llama.cpp", second_is_interrupted)
    two = [peers.Peer("llama.cpp"), peers.Peer("llama.cpp")]
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        peers.open_peers(two, [object()], 1, None, stack)  # type: ignore[list-item]
    assert opened[0]._process.returncode is not None
