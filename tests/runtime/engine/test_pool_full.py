"""Every allocation of a block fails once: for want of blocks nobody is lost, for want of memory all are."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.errors import PoolFullError
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.slabs import Slabs
from headrace.runtime.ops import BLOCK
from tests.steady import SteadyPace
from tests.watched import split

LIMIT = 3 * BLOCK
REQUESTS = [Request([(7 * i * i + 5 * n + 3) % 96 for i in range(BLOCK + n)], max_tokens=20 + n) for n in (-9, -2, 30)]


def ready(network: Decoder) -> Engine:
    """What fails at which call of an allocation depends on who is there at the same time."""
    return Engine(network, context_limit=LIMIT, pace=SteadyPace(LIMIT))


def said(engine: Engine) -> list[list[int]]:
    sequences = [engine.submit(request) for request in REQUESTS]
    tokens: dict[Any, list[int]] = {sequence: [] for sequence in sequences}
    for _ in range(500):
        if not engine.has_work:
            break
        for sequence, event in engine.step():
            tokens[sequence] += event.tokens if isinstance(event, Step) else ()
    assert not engine.has_work
    return [tokens[sequence] for sequence in sequences]


def failing(function: Callable[..., Any], calls: list[int], at: range, error: Exception) -> Callable[..., Any]:
    """It fails from the call at.start on, until at.stop."""

    def call(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) - 1 in at:
            raise type(error)(*error.args)  # a new one, whose traceback nobody keeps
        return function(*arguments)

    return call


def test_without_a_block_the_youngest_steps_back_and_nobody_is_lost(paged: Decoder) -> None:
    expected = said(ready(paged))
    allocate = BlockPool.allocate
    stepped_back = 0
    for at, lasting in [*((at, 1) for at in range(7)), (0, 2), (1, 2)]:
        calls: list[int] = []
        full = failing(allocate, calls, range(at, at + lasting), PoolFullError("all blocks are in use"))
        engine = ready(paged)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(BlockPool, "allocate", full)
            assert said(engine) == expected
        stepped_back += len(calls) > at
        assert engine.load().kv_used_bytes == 0
        assert engine.load().pool_bytes == 0
    assert stepped_back >= 5


def test_one_that_is_alone_and_lacks_a_block_is_told(paged: Decoder) -> None:
    engine = ready(paged)
    with pytest.MonkeyPatch.context() as patched:
        full = failing(BlockPool.allocate, [], range(1, 2), PoolFullError("all blocks are in use"))
        patched.setattr(BlockPool, "allocate", full)
        with pytest.raises(PoolFullError):
            list(engine.generate(Request(REQUESTS[0].prompt, max_tokens=30)))
    assert split(list(engine.generate(Request([1, 2], max_tokens=3))))[1].reason == "length"


def test_without_memory_for_a_slab_all_are_lost_and_the_engine_is_ready_again(paged: Decoder) -> None:
    gc.collect()  # what earlier tests left behind must not go while we weigh
    before = mx.get_active_memory()
    expected = said(ready(paged))
    for at in range(3):
        with pytest.MonkeyPatch.context() as patched:
            none_left = failing(Slabs.set_aside, [], range(at, at + 1), RuntimeError("[malloc] cannot allocate"))
            patched.setattr(Slabs, "set_aside", none_left)
            engine = ready(paged)
            try:
                said(engine)
                lost = False
            except RuntimeError:
                lost = True
        assert lost or at > 1
        assert not engine.has_work
        assert engine.load().pool_bytes == 0
        assert said(engine) == expected
    gc.collect()  # tracebacks hold on to the passes that failed
    assert mx.get_active_memory() <= before
