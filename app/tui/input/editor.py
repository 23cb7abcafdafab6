"""Writing a long text in the user's own editor: $VISUAL, $EDITOR, else the first that is there."""

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
    """The text as it was saved, without the line break editors put at its end. The terminal must be free.

    Raises UsageError where no editor can be run or it ends with an error; the text is then as it was.
    """
    command = _command()
    handle, name = tempfile.mkstemp(prefix="headrace-", suffix=".md")
    file = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
        # Ctrl+C in the editor is the editor's: a handler of Python's own is not handed on to it.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            code = subprocess.run([*command, name]).returncode
        finally:
            signal.signal(signal.SIGINT, before)
        if code:
            raise UsageError(f"{command[0]} ended with exit code {code}", "the text is as it was")
        return file.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}", "EDITOR names another editor") from None
    finally:
        file.unlink(missing_ok=True)


def _command() -> list[str]:
    for variable in ("VISUAL", "EDITOR"):
        if value := os.environ.get(variable, "").strip():
            try:
                return shlex.split(value)
            except ValueError:
                raise UsageError(f"{variable} cannot be understood: {value}") from None
    for name in _USUAL:
        if shutil.which(name):
            return [name]
    raise UsageError("there is no editor", "EDITOR names one")
