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
_RAISE_AGAIN_S = 0.002  # until an exit that a finalizer swallowed is raised again, in the main thread
_PATIENCE_S = 2.0  # for threads that do not stop


def run_process() -> None:
    """Run the command line and exit with its code."""
    code = _INTERRUPTED
    sys.unraisablehook = _swallowed
    _let_signals_wait_for_extensions()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _exit_by_signal)
    try:
        code = _run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        pass
    finally:
        _bound_interpreter_end(code)
    sys.exit(code)


def _bound_interpreter_end(code: int) -> None:
    """Exit at once for Ctrl-C from here on, and after _PATIENCE_S if a signal ended the command.

    The interpreter's own end waits for threads, which may be in a long call.
    """

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
    """Return the call with signals held back: their handlers run after it."""

    def delaying_signals(*arguments: Any) -> Any:
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

    return delaying_signals


def _run() -> int:
    """Prepare the streams, run the command line and return its exit code."""
    # Imported here, where the signal handlers are set: these imports take a while.
    from headrace.app.cli.standard_streams import prepare_streams
    from headrace.runtime.machine.garbage import importing

    prepare_streams()
    with importing():
        from headrace.app.cli.commands import run_command_line

    return run_command_line()


def _exit_by_signal(number: int, _frame: FrameType | None) -> None:
    """Unwind the stack, and exit with the code of a shell for this signal."""
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
    signal.setitimer(signal.ITIMER_REAL, _RAISE_AGAIN_S)
