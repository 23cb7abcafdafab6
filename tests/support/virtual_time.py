"""An event loop whose waits take no time: its clock jumps to the next timer when nothing else is to be done."""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import textual.command
import textual.widget
from textual import _time

_START_S = 1e6  # nothing that is measured from zero was a moment ago
_real_sleep = time.sleep


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which stands still while code runs.

    So the order of timers does not depend on the speed of the machine. Only calls in the loop's executor are waited for
    in real time; other threads and processes are not (see `Driver.until`).
    """

    def __init__(self) -> None:
        self._now = _START_S
        self._num_threads = 0  # calls that run in a thread of the executor
        self._thread = threading.get_ident()
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._num_threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Wait for the executor without the limit that `asyncio.Runner.close` gives since Python 3.12.

        The clock would jump to it: the thread that joins the executor's is not counted.
        """
        await super().shutdown_default_executor()

    def sleep(self, seconds: float) -> None:
        """Block the thread as `time.sleep` does; the clock goes on if it is the loop's."""
        _real_sleep(seconds)
        if threading.get_ident() == self._thread:
            self._now += seconds

    def _thread_ended(self, _: object) -> None:
        self._num_threads -= 1


class _Selector(selectors.DefaultSelector):
    """The selector of a VirtualTimeLoop, which asks it to wait until the next timer."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        before = time.monotonic_ns()
        ready = super().select(timeout if self._loop._num_threads else 0)
        if self._loop._num_threads:
            self._loop._now += min((time.monotonic_ns() - before) / 1e9, timeout)
        elif not ready:
            self._loop._now += timeout
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, as `asyncio.run` does, with the clocks of Python and textual set to the loop's."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.MonkeyPatch.context() as patch:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        clock = loop.time
        patch.setattr(time, "sleep", loop.sleep)
        for name in ("monotonic", "perf_counter"):
            patch.setattr(time, name, clock)
        patch.setattr(_time, "get_time", clock)
        for module in (textual.widget, textual.command):
            patch.setattr(module, "monotonic", clock)
        runner.run(main)
