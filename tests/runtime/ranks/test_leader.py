"""Rank 0 waits for answers of the followers within the time limit of a pass."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.ranks.leader import Leader, LeaderBackend, LeaderNetwork, listen
from headrace.runtime.ranks.pass_limit import FIRST_S, PassLimit
from headrace.runtime.ranks.peer_connection import Record


class SlowLeader(Leader):
    """Rank 0 of a follower that hangs. limits: those that its waits exceed, None for a wait without one."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1")
        super().__init__(listener, b"", ["here", "there"], on_lost=lambda _: None, end=lambda _: None)
        self.now = 0.0
        self.limit = PassLimit(lambda: self.now)
        self.limits: list[float | None] = []

    def hang(self) -> None:
        self.now += FIRST_S + 1
        self.limits.append(self.limit.exceeded())

    def ask(self) -> list[Record]:
        self.hang()
        return [{"marks": False, "found": 0}]

    def answers(self, timeout: float | None) -> list[Record]:  # noqa: ARG002
        return []


@pytest.fixture
def leader() -> Iterator[SlowLeader]:
    leader = SlowLeader()
    yield leader
    leader.close()


class Backend:
    """A K/V backend without arrays."""

    def acquire(self, _prompt: object, _entries: int = 0) -> Any:
        return SimpleNamespace(needs_marks=False, committed=0)

    def clear(self) -> None:
        pass


def test_waiting_for_answers_of_followers_has_a_time_limit(leader: SlowLeader) -> None:
    network: Any = SimpleNamespace(pages=False, kv_backend=lambda _: Backend())
    ranked = LeaderNetwork(network, leader, kv_memory=1, staged=False)
    backend = ranked.kv_backend(KVOptions(8))
    backend.acquire([1, 2])
    assert leader.limits == [FIRST_S, FIRST_S]


def test_waiting_for_a_pass_after_an_error_has_a_time_limit(leader: SlowLeader) -> None:
    class Pass:
        """A pass that the followers do not end."""

        @property
        def arrays(self) -> list[object]:
            leader.hang()
            return []

    left: Any = Pass()
    leader.pending = left
    backend: Any = Backend()
    LeaderBackend(backend, leader, marks=False).clear()
    assert leader.limits == [FIRST_S]
