"""Entry point of the `headrace` command. Imports next to nothing: Ctrl-C is quiet once `main` runs.

`app.cli.process` does the rest: `main` is there for the moments before its handlers are set and after they are gone.

Guard: tests/app/cli/test_streams_and_signals.py.
"""

import os
import sys
from types import TracebackType

_INTERRUPTED = 130  # `runtime.errors.INTERRUPTED`, which is not imported yet


def main() -> None:
    """Run the command line and exit with its code.

    Interrupts beyond `run_process` end at once: Python's own end would restore the default, which kills.
    """
    sys.excepthook = _uncaught
    sys.unraisablehook = _swallowed
    try:
        from headrace.app.cli.process import run_process

        run_process()
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exit quietly for an interrupt between two of `main`'s own instructions."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(_INTERRUPTED)
    sys.__excepthook__(kind, error, trace)


def _swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Exit quietly for an interrupt that came within a finalizer, such as one of Python's own imports."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(_INTERRUPTED)
    sys.__unraisablehook__(unraisable)
