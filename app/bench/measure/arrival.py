"""A prompt that joins sequences which decode: what it does to their inter-token latencies, and they to its TTFT.

One repetition has all three: the prompt's length alone, the others before it comes, and all of them together, so that
what drifts drifts for all.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Row

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Arrival, Sample
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Failed, Finished, Request, Step
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import EngineError


def measure_arrival(engine: Engine, test: Test, prompts: Row[Row[int]], tokens: Callable[[int], list[int]]) -> Sample:
    """One repetition. `prompts`: of those who decode; `tokens` gives so many fresh ones. Raises EngineError.

    Latencies are those of all who decode, one after the other; the clock of the one that joins starts when it is
    submitted. `engine` serves all of them at a time and nobody else.
    """
    began = time.perf_counter()
    alone = engine.submit(Request(tokens(test.prompt), max_tokens=1, speculate="off"))
    while engine.has_work:
        for _, event in engine.step():
            if isinstance(event, Step):
                alone_s = time.perf_counter() - began
    assert alone.state == "finished"
    running = [engine.submit(Request(prompt, speculate="off")) for prompt in prompts]
    _steps(engine, running, test, until=lambda counts: min(counts.values()) > 0)
    before = _steps(engine, running, test, until=lambda counts: min(counts.values()) >= test.generate)
    began = time.perf_counter()
    joining = engine.submit(Request(tokens(test.prompt), max_tokens=1, speculate="off"))
    meanwhile = _steps(engine, [*running, joining], test, until=lambda counts: counts[joining] > 0)
    ttft_s = time.perf_counter() - began
    for sequence in running:
        engine.cancel(sequence)
    while engine.has_work:
        engine.step()
    return Sample(
        prefill_s=ttft_s,
        first_step_s=0.0,
        latencies_s=[latency for sequence in running for latency in meanwhile[sequence]],
        arrival=Arrival([latency for sequence in running for latency in before[sequence]], alone_s),
    )


def _steps(
    engine: Engine, sequences: Row[Sequence], test: Test, *, until: Callable[[dict[Sequence, int]], bool]
) -> dict[Sequence, list[float]]:
    """Inter-token latencies of each, in steps of the engine until the numbers of them are as wanted."""
    found: dict[Sequence, list[float]] = {sequence: [] for sequence in sequences}
    while not until({sequence: len(latencies) for sequence, latencies in found.items()}):
        for sequence, event in engine.step():
            if isinstance(event, Step):
                found[sequence].append(event.record.latency_s)
            elif isinstance(event, Finished | Failed):
                raise EngineError(f"{test.label}: a sequence ended while it was measured")
    return found
