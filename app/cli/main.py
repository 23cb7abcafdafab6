"""The `headrace` process: usable streams, clean ends on signals, an exit code. What it does is in `app.cli.commands`.

Ctrl-C ends with 130 and never with a traceback, however early, late or often it comes; SIGTERM and SIGHUP unwind the
stack as an exit does, so that downloads in other processes are ended and half-built models deleted.
"""

import atexit
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_INTERRUPTED = 128 + signal.SIGINT
_SOON_S = 0.002
_PATIENCE_S = 2.0  # with threads that do not notice that their work is not wanted any more


def main() -> None:
    """Run the command line and leave with its exit code."""
    code = _INTERRUPTED
    try:
        sys.excepthook, sys.unraisablehook = _uncaught, _swallowed
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
                signal.signal(number, _leave)
        try:
            code = _run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            _end_soon(code)
    except KeyboardInterrupt:
        pass
    sys.exit(code)


def _end_soon(code: int) -> None:
    """What is left is the interpreter's own end, which waits for threads: not long if a signal asked for it."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, leave)
        atexit.register(signal.signal, number, signal.SIG_IGN)  # Python's last act would be to have them kill
    if code > 128:
        # Again and again: one that comes as the main thread begins to wait for another does not wake it.
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S, _PATIENCE_S)


def _run() -> int:
    from headrace.app.cli.standard_streams import prepare_streams

    prepare_streams()
    from headrace.app.cli.commands import (
        run_command_line,  # within reach of the handlers, since importing it takes a while
    )

    return run_command_line()


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would cut the cleaning up short
    sys.exit(128 + number)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An interrupt between two of `main`'s own instructions."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """A signal that came while a finalizer ran, which nothing can leave by raising: raise it again, outside.

    Of a temporary folder that a failing disk does not let go nobody hears: the command says what failed of its own.
    """
    error = unraisable.exc_value
    if isinstance(error, OSError):
        from headrace.runtime.config.environment import debug

        if not debug():
            return
    ours = threading.current_thread() is threading.main_thread()
    if not ours or not isinstance(error, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    end = error

    def again(_number: int, _frame: FrameType | None) -> None:
        raise end

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)
