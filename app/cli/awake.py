"""Keep a Mac awake while a command runs that may take long.

Guard: tests/app/cli/test_awake.py, with a `caffeinate` of its own.
"""

import os
import sys

_processes: list[object] = []  # a Popen that is collected while its process runs would warn


def keep_awake() -> None:
    """Prevent idle sleep of a Mac until this process ends. The display may sleep. Do nothing elsewhere."""
    if sys.platform != "darwin":
        return
    import subprocess
    from contextlib import suppress

    # -i: no idle sleep; -w: until the process with this id ends
    command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
    devnull = subprocess.DEVNULL
    with suppress(OSError):
        _processes.append(subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull))
