"""Entry point of the `headrace` command. Imports next to nothing: Ctrl-C is quiet once `main` runs.

`app.cli.process` does the rest.
"""

import sys
from types import TracebackType

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code."""
    sys.excepthook = _uncaught
    try:
        from headrace.app.cli.process import run_process

        run_process()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ignore an interrupt between two of `main`'s own instructions."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
