"""Latency of a prompt that joins decoding sequences, and its effect on theirs.

One repetition measures the prompt alone, the others before it arrives, and all together, so that drift affects all
three.
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
    """Measure one repetition. Raises EngineError.

    prompts: one for each decoding sequence; tokens(n): n fresh token ids. Latencies are concatenated over the decoding
    sequences; TTFT counts from the submission of the joining prompt. `engine` has no other requests.
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
    """Step the engine until `until` accepts the counts; return each sequence's inter-token latencies."""
    found: dict[Sequence, list[float]] = {sequence: [] for sequence in sequences}
    while not until({sequence: len(latencies) for sequence, latencies in found.items()}):
        for sequence, event in engine.step():
            if isinstance(event, Step):
                found[sequence].append(event.record.latency_s)
            elif isinstance(event, Finished | Failed):
                raise EngineError(f"{test.label}: a sequence ended during the measurement")
    return found
