"""Web addresses to the platform's browser; never to one that runs in the terminal."""

import os
import shutil
import subprocess
import sys
import threading

_TOOLS = (
    ("open", "darwin", ""),
    ("wslview", "linux", "WSL_DISTRO_NAME"),
    ("xdg-open", "linux", "WAYLAND_DISPLAY"),
    ("xdg-open", "linux", "DISPLAY"),
)


def open_address(address: str) -> bool:
    """Start the platform's browser without waiting for it; return whether one was started."""
    for tool, platform, variable in _TOOLS:
        if sys.platform == platform and (not variable or os.environ.get(variable)) and shutil.which(tool):
            try:
                started = subprocess.Popen(
                    [tool, address],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                continue
            threading.Thread(target=started.wait, daemon=True).start()  # or it stays behind as a zombie
            return True
    return False
