"""headrace commands in forks of a process that has already imported everything, to save start-up time.

Contract: a run is a process and session of its own, with the environment of the first run; the forking process has only
its main thread. Linux and macOS.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from tests.faults.chat_terminal import Chat

# What commands import when they run, and what `tests.fuzz.kills` does.
_IMPORTED = (
    "huggingface_hub.file_download", "huggingface_hub.hf_api", "jinja2.sandbox", "mlx.core", "numpy", "tokenizers",
    "headrace.app.api", "headrace.app.batch.output", "headrace.app.batch.run_batch", "headrace.app.cli.batch",
    "headrace.app.cli.chat", "headrace.app.cli.models", "headrace.app.sessions.unsaved", "headrace.app.tui.app",
    "headrace.models.loading.load", "headrace.models.registry.fetch_hub", "headrace.runtime.engine.engine",
    "tests.faults.test_kills", "tests.faults.test_ui_kills", "tests.faults.writer_kills", "tests.support.hub_server",
    "tests.support.tiny_chat",
)  # fmt: skip
FORKS = multiprocessing.get_context("forkserver")
# The main module is run again in every fork, as in any child of a fork server: what it imports is there, too.
FORKS.set_forkserver_preload([__name__, *_IMPORTED])


def run(arguments: Sequence[str], errors: Path, seconds: float | None = None) -> bool:
    """Run headrace; returns whether it was killed after so many seconds. Raises AssertionError if it fails."""
    process = FORKS.Process(target=_headrace, args=(list(arguments), errors))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        assert process.pid is not None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no session yet
            process.kill()
        process.join()
        return True
    assert process.exitcode == 0, errors.read_text("utf-8", "replace")[-2000:]
    return False


def _headrace(arguments: list[str], errors: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    told = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    run_on(arguments, (nothing, nothing, told))


class ForkedChat(Chat):
    """A chat in a forked process. Its engine is a fresh interpreter, as in any chat."""

    def _start(self, arguments: Sequence[str], terminal: int, environment: Mapping[str, str], first: str) -> Any:
        assert not first
        return _OnTerminal(arguments, terminal, environment)


class _OnTerminal:
    """headrace in a fork with its streams on a terminal, with the interface of `subprocess`."""

    # What multiprocessing keeps of a process is looked at whenever another one starts: by one thread at a time.
    _one = threading.Lock()

    def __init__(self, arguments: Sequence[str], terminal: int, environment: Mapping[str, str]) -> None:
        given = (list(arguments), _Descriptor(terminal), dict(environment))
        self._process = FORKS.Process(target=_headrace_on_terminal, args=given)
        with self._one:
            self._process.start()

    def poll(self) -> int | None:
        with self._one:
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        with self._one:
            self._process.join()
            return self._process.exitcode


class _Descriptor:
    """A descriptor of this process, inherited by the fork under the same number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_here, (reduction.DupFd(self._number),)


def _number_here(sent: Any) -> int:
    return int(sent.detach())


def _headrace_on_terminal(arguments: list[str], terminal: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    run_on(arguments, (terminal,) * 3)


def run_on(arguments: list[str], streams: Sequence[int]) -> None:
    from headrace.app.cli.main import main

    os.setsid()
    for stream, here in enumerate(streams):
        os.dup2(here, stream)
    # multiprocessing has closed the one, and the others were made for what they were in the forking process.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False)  # type: ignore[misc]
    sys.argv = ["headrace", *arguments]
    main()
