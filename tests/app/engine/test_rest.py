"""An engine that was told to rest leaves the machine alone until it is asked for something."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.app.engine.messages import Command, Generate, Rest
from headrace.app.engine.process import Server


class OverError(Exception):
    """There are no more commands."""


class Host:
    """Counts what it is asked to do."""

    reading_due, keeping_due = True, False
    busy = False

    def __init__(self) -> None:
        self.did: list[str] = []

    def rest(self) -> None:
        self.did.append("rest")

    def resume(self) -> None:
        self.did.append("resume")

    def measure(self) -> str:
        self.did.append("measure")
        return "measured"

    def begin(self, *_: Any) -> None:
        self.did.append("generate")


class Inbox:
    """Commands; None: nothing comes for as long as is waited."""

    def __init__(self, commands: list[Command | None]) -> None:
        self._commands: Iterator[Command | None] = iter(commands)

    def next(self, timeout: float | None) -> Command | None:
        for command in self._commands:
            if command is not None or timeout is not None:
                return command
        raise OverError

    def cancel_flag(self, _: int) -> None: ...

    def over(self, _: int) -> None: ...


def test_a_resting_engine_measures_nothing_and_reads_no_files() -> None:
    host = Host()
    server = Server(Inbox([None, Rest(), Rest(), None, Generate(1, []), None]), lambda _: None)  # type: ignore[arg-type]
    server._host = host  # type: ignore[assignment]
    with pytest.raises(OverError):
        server.serve()
    assert host.did == ["measure", "rest", "resume", "generate", "measure"]
