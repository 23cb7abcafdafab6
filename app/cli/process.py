"""The `headrace` process: streams, signals and the exit code. `app.cli.commands` parses arguments.

Ctrl-C exits with 130, never with a traceback. SIGTERM and SIGHUP unwind the stack, so that child processes end and
half-built models are deleted. `tests/app/cli/test_streams_and_signals.py` sends each signal at many moments.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

_INTERRUPTED = 128 + signal.SIGINT  # `runtime.errors.INTERRUPTED`, which is not imported yet
_SOON_S = 0.002  # until an exit that a finalizer swallowed is raised again, in the main thread's next instructions
_PATIENCE_S = 2.0  # for threads that do not stop


def run_process() -> None:
    """Run the command line and exit with its code."""
    code = _INTERRUPTED
    sys.unraisablehook = _swallowed
    _let_signals_wait_for_extensions()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _leave)
    try:
        code = _run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        pass
    finally:
        _end_soon(code)
    sys.exit(code)


def _end_soon(code: int) -> None:
    """Bound the interpreter's own end, which waits for threads, if a signal asked for it."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, leave)
        atexit.register(signal.signal, number, signal.SIG_IGN)  # before Python restores the default, which would kill
    if code > 128:
        # Repeats: a signal does not wake a main thread that just begins to join another.
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S, _PATIENCE_S)


def _let_signals_wait_for_extensions() -> None:
    """Run the handlers of signals after the import of an extension: MLX's would turn their exceptions into others.

    docs/workarounds.md lists it.
    """
    for name in ("create_module", "exec_module"):
        setattr(ExtensionFileLoader, name, _uninterrupted(getattr(ExtensionFileLoader, name)))


def _uninterrupted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call after which the handlers run of the signals that came during it."""

    def patient(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # no handler runs there
            return call(*arguments)
        received: list[int] = []

        def note(number: int, _frame: FrameType | None) -> None:
            received.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.signal(number, note) for number in numbers if signal.getsignal(number) is not None}
        try:
            return call(*arguments)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for came in received:
                signal.raise_signal(came)

    return patient


def _run() -> int:
    # All imports are inside the signal handlers, since they take a while.
    from headrace.app.cli.standard_streams import prepare_streams
    from headrace.runtime.machine.garbage import importing

    prepare_streams()
    with importing():
        from headrace.app.cli.commands import run_command_line

    return run_command_line()


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    sys.exit(128 + number)


def _swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise an exit or interrupt again if it came during a finalizer, which cannot propagate it.

    OSErrors of finalizers (a temporary folder on a failing disk) are shown with HEADRACE_DEBUG only.
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
