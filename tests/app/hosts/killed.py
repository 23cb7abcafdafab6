"""Runs on two ranks of this machine that lose one, in a known phase."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from tests.patience import PATIENCE_S
from tests.test_house import ROOT
from tests.tiny_chat import write_chat_model

PHASES = ("start", "load", "prefill", "decode", "idle")


class Run:
    """A driver and the rank behind it."""

    def __init__(self, model: Path, phase: str, split: str = "tensor") -> None:
        self._phase = phase
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "tests.app.hosts.driver", str(model), "localhost,localhost", split, phase],
            stdin=subprocess.PIPE,  # `ended` closes it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.follower = psutil.Process()

    def wait(self) -> "Run":
        """Wait for the phase and the other rank's process."""
        try:
            self.follower = self._follower()
        except BaseException:
            self.driver.kill()
            raise
        return self

    def _follower(self) -> psutil.Process:
        until = time.monotonic() + PATIENCE_S
        if self._phase != "start":
            output: IO[str] = self.driver.stdout  # type: ignore[assignment]
            while (line := output.readline().strip()) != self._phase:
                assert line, f"ended before: {self.driver.communicate()}"
        while time.monotonic() < until:
            for process in psutil.Process(self.driver.pid).children(recursive=True):
                with suppress(psutil.Error):  # one that has just ended
                    if "headrace.app.hosts.rank" in process.cmdline() and "python" in process.name():
                        return process
            time.sleep(0.005)
        raise AssertionError("no follower")

    def ended(self) -> tuple[int, str]:
        """Wait for the driver's end; return (exit code, standard error)."""
        _, errors = self.driver.communicate(timeout=PATIENCE_S)
        return self.driver.returncode, errors

    def no_orphan(self) -> bool:
        """Wait for the follower's end."""
        try:
            self.follower.wait(PATIENCE_S)
        except psutil.NoSuchProcess:
            return True
        except psutil.TimeoutExpired:
            self.follower.kill()
            return False
        return True

    def close(self) -> None:
        self.driver.kill()
        if self.follower.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):
                self.follower.kill()
        self.driver.communicate(timeout=PATIENCE_S)


def kill_ranks(folder: Path, times: int, seed: int) -> str:
    """Kill or stop either rank in a random phase, after a random time: all end, and the lost one is named."""
    choose, model, stops = random.Random(seed), write_chat_model(folder / "model"), 0
    longest = dict.fromkeys(PHASES, 0.0)
    for _ in range(times):
        phase = choose.choice(PHASES)
        run = Run(model, phase).wait()
        try:
            time.sleep(choose.uniform(0, 0.05))
            leader, stop = choose.random() < 0.3, choose.random() < 0.2
            stops += stop
            began = time.monotonic()
            end: Callable[[], None] = run.driver.kill if leader else run.follower.suspend if stop else run.follower.kill
            with suppress(psutil.NoSuchProcess):
                end()
            if not leader:
                code, errors = run.ended()
                assert code == 1, errors
                assert "rank 1 (localhost)" in errors, errors
            assert run.no_orphan()
            longest[phase] = max(longest[phase], time.monotonic() - began)
        finally:
            run.close()
    ends = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in longest.items())
    return f"{stops} of them stops, all ended after at most so many seconds: {ends}"
