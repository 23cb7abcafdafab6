"""A crash of the terminal UI as one line and a report file.

Textual prints the traceback with the values of local variables, which can hold the text of a prompt.

Guard: tests/tui/textual_overrides/test_crash.py.
"""

import sys
import time
import traceback
from pathlib import Path

from textual.app import App, ReturnType

from headrace.runtime.config import environment
from headrace.runtime.config.paths import cache_dir


class CrashReports(App[ReturnType]):
    """An app that writes a report when it crashes."""

    crash: str | None = None  # the fault and its report file, as one line

    def _fatal_error(self) -> None:
        """See `App`. Textual's own traceback with HEADRACE_DEBUG."""
        if environment.debug():
            super()._fatal_error()
            return
        self.crash = write_report(sys.exception())
        self._close_messages_no_wait()


def write_report(error: BaseException | None) -> str:
    """Write the traceback of an error to a file that only the user can read; return one line about both."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    fault = lines[-1] if lines else "unknown error"
    message = f"the terminal UI crashed: {fault}"
    try:
        folder = cache_dir() / "crashes"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / time.strftime("%Y-%m-%d-%H%M%S.txt")
        path.touch(mode=0o600)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as problem:
        return f"{message} (no report: {problem})"
    return f"{message} (report: {_short(path)})"


def _short(path: Path) -> str:
    """Return a path with ~ for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
