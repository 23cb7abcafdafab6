"""The platform's tools: text to the clipboard, web addresses to a browser, never to one that runs in the terminal.

OSC 52, the other way to the clipboard, is the terminal's own; `ChatState.copy` uses both. A new platform is a row of
`_CLIPBOARDS` or `_BROWSERS`. Addresses come from a model: callers pass only those that `is_web_address` accepts, after
the user has seen them.

Guard: tests/tui/test_copy_actions.py.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class _Program(NamedTuple):
    """A program of a platform."""

    command: tuple[str, ...]
    platform: str  # as in `sys.platform`
    variable: str = ""  # environment variable that has to be set, where the platform has several displays


# In the order in which they are tried.
_CLIPBOARDS = (
    _Program(("pbcopy",), "darwin"),
    _Program(("wl-copy",), "linux", "WAYLAND_DISPLAY"),
    _Program(("xclip", "-selection", "clipboard"), "linux", "DISPLAY"),
    _Program(("xsel", "--clipboard", "--input"), "linux", "DISPLAY"),
    _Program(("clip.exe",), "linux", "WSL_DISTRO_NAME"),
)
_BROWSERS = (
    _Program(("open",), "darwin"),
    _Program(("wslview",), "linux", "WSL_DISTRO_NAME"),
    _Program(("xdg-open",), "linux", "WAYLAND_DISPLAY"),
    _Program(("xdg-open",), "linux", "DISPLAY"),
)
_PATIENCE_S = 2.0  # for a clipboard tool, which may wait for a display that is gone


def copy_with_tool(text: str) -> bool:
    """Copy text with the platform's tool; return False if there is none or it fails. Takes up to two seconds."""
    command = next(_installed(_CLIPBOARDS), None)
    if command is None:
        return False
    try:
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def open_address(address: str) -> bool:
    """Start the platform's browser without waiting for it; return whether one was started."""
    for command in _installed(_BROWSERS):
        try:
            started = subprocess.Popen(
                [*command, address],
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


def _installed(tools: Sequence[_Program]) -> Iterator[tuple[str, ...]]:
    """Yield the commands that are installed and work on this platform and display."""
    for tool in tools:
        has_display = not tool.variable or bool(os.environ.get(tool.variable))
        program, *_ = tool.command
        if sys.platform == tool.platform and has_display and shutil.which(program):
            yield tool.command
