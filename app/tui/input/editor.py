"""Writing a long text in the user's own editor: $VISUAL, $EDITOR, else the first that is there.

The chat calls `edit_text` while its screen is suspended (`MessageActions`). Text that was written must not be lost, so
the file of an editor that was killed stays.

Guard: tests/tui/test_queue.py.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from headrace.runtime.errors import UsageError

_USUAL = ("nano", "vim", "vi")


def edit_text(text: str) -> str:
    """Let the user edit text in an editor; return it without the final line break. The terminal must be free.

    Raises UsageError if no editor runs, or it ends with an error. The file of a killed editor is kept, if it was saved.
    """
    command = _command()
    handle, name = tempfile.mkstemp(prefix="headrace-", suffix=".md")
    file = Path(name)
    keep = False
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(text)
        code = _run([*command, name])
        edited = file.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
        if code < 0:
            keep = edited != text
            hint = f"its text is in {name}" if keep else "the text is unchanged"
            raise UsageError(f"{command[0]}: killed by {signal.Signals(-code).name}", hint)
        if code:
            raise UsageError(f"{command[0]}: exit code {code}", "the text is unchanged")
        return edited
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror}", "set EDITOR to another editor") from None
    finally:
        if not keep:
            file.unlink(missing_ok=True)


def _run(command: list[str]) -> int:
    """Run an editor and return its exit code, negative if a signal killed it."""
    # Ctrl+C is for the editor. It does not inherit a handler, as it would inherit SIG_IGN.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _command() -> list[str]:
    """Return the editor's command. Raises UsageError without one."""
    for variable in ("VISUAL", "EDITOR"):
        if value := os.environ.get(variable, "").strip():
            try:
                return shlex.split(value)
            except ValueError:
                raise UsageError(f"{variable}: invalid command line: {value}") from None
    for name in _USUAL:
        if shutil.which(name):
            return [name]
    raise UsageError("no editor found", "set EDITOR to one")
