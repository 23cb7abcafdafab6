"""Text to the platform's clipboard tool. OSC 52, the other way, is the terminal's own."""

import os
import shutil
import subprocess
import sys

_TOOLS = (
    (("pbcopy",), "darwin", ""),
    (("wl-copy",), "linux", "WAYLAND_DISPLAY"),
    (("xclip", "-selection", "clipboard"), "linux", "DISPLAY"),
    (("xsel", "--clipboard", "--input"), "linux", "DISPLAY"),
    (("clip.exe",), "linux", "WSL_DISTRO_NAME"),
)
_PATIENCE_S = 2.0


def platform_tool() -> tuple[str, ...] | None:
    """Return the command that copies its standard input to the clipboard; None if there is none."""
    for command, platform, variable in _TOOLS:
        if sys.platform == platform and (not variable or os.environ.get(variable)) and shutil.which(command[0]):
            return command
    return None


def copy_with_tool(text: str) -> bool:
    """Copy text with the platform's tool; return False if there is none or it fails. Takes up to two seconds."""
    command = platform_tool()
    if command is None:
        return False
    try:
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
