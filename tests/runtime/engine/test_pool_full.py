"""Blocks are never short; without memory for them all sequences are lost, and the engine is ready for others."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Finished, Request, Step
from headrace.runtime.kv.paged_arrays import PagedArrays
from headrace.runtime.ops import BLOCK
from tests.support.steady import SteadyPace

LIMIT = 3 * BLOCK
REQUESTS = [Request([(7 * i * i + 5 * n + 3) % 96 for i in range(BLOCK + n)], max_tokens=20 + n) for n in (-9, -2, 30)]


def ready(network: Decoder) -> Engine:
    """Engine whose pool fails at an allocation that depends on the sequences present at that time."""
    return Engine(network, context_limit=LIMIT, chunk_budget=SteadyPace(LIMIT))


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


@pytest.mark.sampled
@pytest.mark.parametrize("max_running", [1, 2])
def test_blocks_are_freed_before_the_next_sequence_is_admitted(paged: Decoder, max_running: int) -> None:
    """Each takes all the blocks that one sequence may have, and others wait."""
    requests = [Request(range(number, number + LIMIT - 9), max_tokens=9) for number in range(0, 60, 10)]
    requests = [replace(request, prompt=[token % 96 for token in request.prompt]) for request in requests]
    engine = Engine(paged, context_limit=LIMIT - 1, max_running=max_running, kv_memory=1 << 40)
    sequences = [engine.submit(replace(request, prompt=request.prompt[:-1])) for request in requests]
    ends = 0
    while engine.has_work:
        for _, event in engine.step():
            ends += isinstance(event, Finished)
    assert ends == len(requests)
    assert all(len(sequence.tokens) == LIMIT - 10 + 9 for sequence in sequences)
    assert engine.load().preempted == 0


def test_without_memory_for_a_slab_all_sequences_fail_and_the_engine_is_ready(paged: Decoder) -> None:
    gc.collect()  # what earlier tests left behind must not go while we weigh
    before = mx.get_active_memory()
    expected = said(ready(paged))
    for at in range(3):
        with pytest.MonkeyPatch.context() as patched:
            none_left = failing(PagedArrays.allocate, [], range(at, at + 1), RuntimeError("[malloc] cannot allocate"))
            patched.setattr(PagedArrays, "allocate", none_left)
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
