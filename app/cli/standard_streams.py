"""Standard input, output and error as the program may rely on them, whatever the caller left of them.

A descriptor 0, 1 or 2 that was closed is opened on the null device, or the next file opened (a model's weights) would
get its number. Standard output tells its own failures from everybody else's: a reader that left raises
`ReaderGoneError`, a full disk `OutputError`. What its encoding cannot write is escaped, as on standard error.
"""

import codecs
import io
import os
import sys

from headrace.runtime.errors import HeadraceError

_ESCAPED = "headrace-escaped"
_STRICT = ("strict", "surrogateescape")  # what Python chooses by itself; anything else was asked for


class ReaderGoneError(Exception):
    """Whoever read standard output closed it. Not an OSError: click would exit with 1 on those by itself."""


class OutputError(HeadraceError):
    """Standard output could not be written."""


class _Output(io.FileIO):
    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except OSError as error:
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def prepare_streams() -> None:
    """Make all three streams usable. Call it before anything opens a file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    codecs.register_error(_ESCAPED, _escape)
    said = sys.stdout
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(1, "w", closefd=False)),
        encoding=said.encoding if said else "utf-8",
        errors=_ESCAPED if said is None or said.errors in _STRICT else said.errors,
        line_buffering=said.line_buffering if isinstance(said, io.TextIOWrapper) else False,
    )


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """A byte of a file's name that is no text goes out as it came in; what cannot be encoded as \\xNN, \\uNNNN."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def silence_stdout() -> None:
    """Standard output cannot be written any more: keep the interpreter's last flush from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
