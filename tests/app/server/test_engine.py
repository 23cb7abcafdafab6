"""Counts of open requests, with a client that fails."""

import asyncio
import itertools
from typing import Any, cast

import pytest

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import Generate
from headrace.app.server.engine import ServedEngine


class Failing:
    """A client that takes no command."""

    state = "ready"
    descriptor = None
    behind = False

    def submit(self, _: object) -> None:
        raise RecursionError

    def poll(self) -> list[Any]:
        return []

    def cancel(self, _: int) -> None:
        pass

    def time_steps(self, _: int) -> None:
        pass


def test_a_request_that_cannot_be_sent_is_not_open() -> None:
    async def submit() -> None:
        engine = ServedEngine(cast(EngineClient, Failing()), ModelSpec(), max_open=1, ids=itertools.count(1))
        for _ in range(3):
            with pytest.raises(RecursionError):
                engine.submit([Generate(*engine.new_ids())], watched=True)
        assert engine.open == 0

    asyncio.run(submit())
