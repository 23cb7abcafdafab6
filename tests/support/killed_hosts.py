"""Runs on two ranks of this machine that lose one, in a known phase."""

import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO

import psutil

from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model
from tests.test_house import ROOT

PHASES = ("start", "load", "join", "prefill", "decode", "idle")


class Run:
    """A driver and the rank behind it."""

    def __init__(self, model: Path, phase: str, split: str = "tensor") -> None:
        self._phase = phase
        self._folder = tempfile.TemporaryDirectory()  # of the ranks' temporary files
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hosts_driver", str(model), "localhost,localhost", split, phase],
            stdin=subprocess.PIPE,  # `ended` closes it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": self._folder.name},
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

    def left_behind(self) -> list[str]:
        """Return the ranks' temporary files."""
        return [path.name for path in Path(self._folder.name).iterdir()]

    def close(self) -> None:
        self.driver.kill()
        if self.follower.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):
                self.follower.kill()
        self.driver.communicate(timeout=PATIENCE_S)
        self._folder.cleanup()


def kill_ranks(folder: Path, times: int, seed: int) -> str:
    """Kill or stop either rank in a random phase, after a random time: all end, and the lost one is named."""
    choose = random.Random(seed)
    model = write_chat_model(folder / "model")
    took: dict[tuple[str, str], list[float]] = {}
    for _ in range(times):
        phase = choose.choice(PHASES)
        split = choose.choice(("tensor", "pipeline"))
        what = choose.choice(("rank 0 killed", "rank 1 killed", "rank 1 killed", "rank 1 stopped"))
        run = Run(model, phase, split).wait()
        try:
            time.sleep(choose.uniform(0, 0.3))
            began = time.monotonic()
            _harm(run, what)
            assert run.no_orphan(), (phase, what)
            took.setdefault((what, phase), []).append(time.monotonic() - began)
            assert not run.left_behind(), (phase, what, run.left_behind())
        finally:
            run.close()
    lines = [
        f"  {what} in {phase}: {len(each)} times, median {median(each):.1f} s, longest {max(each):.1f} s"
        for (what, phase), each in sorted(took.items())
    ]
    return "all ended, none left a file:\n" + "\n".join(lines)


def _harm(run: Run, what: str) -> None:
    """Kill or stop a rank; if it is not rank 0, check that rank 0 ends and names it."""
    if what == "rank 0 killed":
        run.driver.kill()
        return
    with suppress(psutil.NoSuchProcess):
        (run.follower.suspend if what == "rank 1 stopped" else run.follower.kill)()
    code, errors = run.ended()
    assert code == 1, errors
    assert "rank 1 (localhost)" in errors, errors
