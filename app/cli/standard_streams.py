"""Standard streams that are always open, with distinct errors for standard output.

A closed descriptor 0, 1 or 2 is opened on the null device; otherwise the next opened file would get its number.
Writing to standard output raises `ReaderGoneError` if the reader closed it, else `OutputError`, also where it was
closed from the start (`>&-`). Characters its encoding lacks are escaped.

Guard: tests/app/cli/test_streams_and_signals.py.
"""

import codecs
import io
import os
import sys

from headrace.runtime.errors import HeadraceError

_ESCAPED = "headrace-escaped"
_STRICT = ("strict", "surrogateescape")  # Python's own choices; others were set by the user


class ReaderGoneError(Exception):
    """The reader closed standard output. Not an OSError, for which click would exit with 1."""


class OutputError(HeadraceError):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """Standard output that raises errors of headrace in place of OSErrors."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from error


def prepare_streams() -> None:
    """Make all three streams usable, before any file is opened."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            access = os.O_RDONLY if descriptor == 1 else os.O_RDWR  # an answer is not lost without a word
            os.set_inheritable(os.open(os.devnull, access), True)  # takes the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    codecs.register_error(_ESCAPED, _escape)
    encoding = "utf-8"
    errors: str | None = _ESCAPED
    line_buffering = False
    original = sys.stdout
    if original is not None:
        encoding = original.encoding
        if original.errors not in _STRICT:
            errors = original.errors
        if isinstance(original, io.TextIOWrapper):
            line_buffering = original.line_buffering
    raw = io.BufferedWriter(_Output(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(raw, encoding=encoding, errors=errors, line_buffering=line_buffering)


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Pass undecodable bytes of a file name through; write other characters as \\xNN or \\uNNNN."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def silence_stdout() -> None:
    """Redirect standard output to the null device, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
