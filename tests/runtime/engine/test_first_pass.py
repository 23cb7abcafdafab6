"""Reports of a first pass that takes long."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine import first_pass
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from tests.support.patience import PATIENCE_S
from tests.support.watched import WatchedNetwork

PROMPT = [5, 17, 3, 88, 42, 9, 61]
SLOW_S = 0.02
EVERY_S = 0.01


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_pass, "SLOW_S", SLOW_S)
    monkeypatch.setattr(first_pass, "_EVERY_S", EVERY_S)


class Slow:
    """An engine with one pass that lasts until a third report, or for a while. reports: all seconds, of any pass."""

    def __init__(
        self,
        network: Decoder,
        slow_pass: int,
        *,
        patience_s: float = PATIENCE_S,
        keep: bool = False,
        compiles: bool = True,
    ) -> None:
        """slow_pass: number of the pass, from 0."""
        self.reports: list[float] = []
        self._enough = threading.Event()

        def on_pass(number: int) -> None:
            if number == slow_pass:
                self._enough.wait(patience_s)

        self.engine = Engine(WatchedNetwork(network, on_pass=on_pass), context_limit=64, keep_prefix=keep)
        self.engine.first_pass.report = self._take
        self.engine.first_pass.compiles = compiles

    def _take(self, seconds: float) -> None:
        self.reports.append(seconds)
        if seconds > SLOW_S + 1.5 * EVERY_S:  # other passes may have fewer reports, on a busy machine
            self._enough.set()


@pytest.mark.parametrize("slow_pass", [0, 1])  # of the prompt, and of its last token
def test_a_slow_pass_before_the_first_token_is_reported(network: Decoder, slow_pass: int) -> None:
    slow = Slow(network, slow_pass)
    tokens = [event for event in slow.engine.generate(Request(PROMPT, max_tokens=4)) if isinstance(event, Step)]
    assert len(tokens) == 4
    # Other passes may have been reported, too, where other programs slow them down.
    assert {round(seconds, 9) for seconds in slow.reports} >= {0.02, 0.03, 0.04}
    assert slow.engine.first_pass.is_over


def test_a_prefetch_is_reported(network: Decoder) -> None:
    slow = Slow(network, 0, keep=True)
    slow.engine.prefetch(PROMPT, stop=lambda: False)
    assert len(slow.reports) >= 3
    assert not slow.engine.first_pass.is_over  # the pass that chooses a token has kernels of its own


def test_passes_after_the_first_token_are_not_reported(network: Decoder) -> None:
    slow = Slow(network, 4, patience_s=0.1)
    reports_at_token = [
        len(slow.reports) for event in slow.engine.generate(Request(PROMPT, max_tokens=8)) if isinstance(event, Step)
    ]
    assert set(reports_at_token) == {len(slow.reports)}


def test_a_slow_first_pass_is_not_reported_after_its_end(network: Decoder) -> None:
    slow = Slow(network, 0)
    generation = slow.engine.generate(Request(PROMPT, max_tokens=1))
    next(generation)
    assert len(slow.reports) >= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "slow work"]
    list(generation)


def test_no_pass_is_reported_where_nothing_is_compiled(network: Decoder) -> None:
    slow = Slow(network, 0, patience_s=5 * SLOW_S, compiles=False)
    assert [event for event in slow.engine.generate(Request(PROMPT, max_tokens=2)) if isinstance(event, Step)]
    assert slow.reports == []


class Ranks:
    """A division that records when the engine waits for the ranks."""

    staged = False
    takes_turns = False
    kv_memory = 1 << 24

    def __init__(self) -> None:
        self.num_waits = 0
        self.depth = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.num_waits += 1
        self.depth += 1
        yield
        self.depth -= 1


def test_every_chunk_of_a_prefetch_waits_for_the_ranks(network: Decoder) -> None:
    ranks = Ranks()
    waits: list[tuple[int, int]] = []
    watched: Any = WatchedNetwork(network, on_pass=lambda _: waits.append((ranks.depth, ranks.num_waits)))
    watched.division = ranks
    engine = Engine(watched, context_limit=128, keep_prefix=True)
    engine.prefetch([1 + i % 90 for i in range(100)], stop=lambda: False)
    assert waits[:2] == [(1, 1), (1, 2)]
    assert all(depth == 1 for depth, _ in waits)
    assert not ranks.depth


def test_the_end_of_a_closed_answer_waits_for_the_ranks(network: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    watched: Any = WatchedNetwork(network)
    watched.division = ranks
    depths: list[int] = []
    synchronize = mx.synchronize
    monkeypatch.setattr(mx, "synchronize", lambda: (depths.append(ranks.depth), synchronize()))
    generation = Engine(watched, context_limit=64).generate(Request(PROMPT, max_tokens=8))
    while not isinstance(next(generation), Step):
        pass
    generation.close()  # the step that was built ahead is still computed, on all ranks
    assert depths == [1]
    assert not ranks.depth
