"""A Mac stays awake while a long command runs: `batch`, `bench`, `pull`, `quantize` and `serve` call `keep_awake`.

Guard: tests/app/cli/test_awake.py, with a `caffeinate` of its own.
"""

import os
import sys

_running: list[object] = []  # kept: a collected one would warn that it still runs


def keep_awake() -> None:
    """Prevent idle sleep of a Mac until this process ends. The display may sleep."""
    if sys.platform == "darwin":
        import subprocess

        command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
        nothing = subprocess.DEVNULL
        try:
            _running.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing))
        except OSError:
            return
