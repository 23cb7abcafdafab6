"""A resting engine does no idle work until the next command."""

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from headrace.app.engine.commands import EngineCommand, Generate, Rest
from headrace.app.engine.preparation import Prepared
from headrace.app.engine.process import CommandLoop


class OverError(Exception):
    """The commands have ended."""


class Idle:
    """Idle work that records its calls."""

    after_s = 1.5

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._resting = False

    @property
    def due(self) -> bool:
        return not self._resting

    def rest(self) -> None:
        self._resting = True

    def resume(self) -> None:
        self._resting = False

    def run(self, *_: Any) -> None:
        self._calls.append("idle work")


class Host:
    """A host that records its calls."""

    busy = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.idle = Idle(self.calls)

    def prepare(self, *_: Any) -> Callable[[], None]:
        return lambda: self.calls.append("generate")


class Inbox:
    """Commands; None is a time-out."""

    def __init__(self, commands: list[EngineCommand | None]) -> None:
        self._commands: Iterator[EngineCommand | None] = iter(commands)
        self._prepared: SimpleQueue[Prepared] = SimpleQueue()
        self.put = self._prepared.put

    def next(self, timeout: float | None, *, joins: bool = False) -> EngineCommand | Prepared | None:
        if joins:
            return self._prepared.get(timeout=9)
        for command in self._commands:
            if command is not None or timeout is not None:
                return command
        raise OverError

    def waiting(self) -> bool:
        return False

    def cancel_flag(self, _: int) -> None: ...


def test_a_resting_engine_does_no_idle_work() -> None:
    host = Host()
    loop = CommandLoop(Inbox([None, Rest(), Rest(), None, Generate(1, []), None]), lambda _: None)  # type: ignore[arg-type]
    loop._host = host  # type: ignore[assignment]
    with pytest.raises(OverError):
        loop.run()
    assert host.calls == ["idle work", "generate", "idle work"]
