"""A prompt that joins decoding sequences: its time to first token, and the latencies of the others.

One repetition measures the prompt alone, the others before it arrives, and all together, so that drift affects all
three. Latencies are concatenated over the decoding sequences. The TTFT counts from the submission of the prompt.

Guard: tests/app/bench/measure/test_own.py.
"""

import time
from collections.abc import Callable, Sequence

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Arrival, Sample
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Finished, Request, SequenceFailed, Step
from headrace.runtime.engine.sequence import Sequence as EngineSequence
from headrace.runtime.errors import EngineError


def measure_arrival(
    engine: Engine, test: Test, prompts: Sequence[Sequence[int]], tokens: Callable[[int], list[int]]
) -> Sample:
    """Measure one repetition. Raises EngineError.

    engine: has no other requests.
    test: an arrival.
    prompts: one for each decoding sequence.
    tokens: returns so many fresh token ids.
    """
    # The prompt alone.
    began = time.perf_counter()
    alone = engine.submit(Request(tokens(test.prompt), max_tokens=1, speculate="off"))
    while engine.has_work:
        for _, event in engine.step():
            if isinstance(event, Step):
                alone_s = time.perf_counter() - began
    assert alone.state == "finished"

    # The others, until each has decoded enough.
    running = [engine.submit(Request(prompt, speculate="off")) for prompt in prompts]
    _step_until(engine, running, test, until=lambda counts: min(counts.values()) > 0)
    before = _step_until(engine, running, test, until=lambda counts: min(counts.values()) >= test.generate)

    # All together, until the joining prompt has its first token.
    began = time.perf_counter()
    joining = engine.submit(Request(tokens(test.prompt), max_tokens=1, speculate="off"))
    meanwhile = _step_until(engine, [*running, joining], test, until=lambda counts: counts[joining] > 0)
    ttft_s = time.perf_counter() - began
    for sequence in running:
        engine.cancel(sequence)
    while engine.has_work:
        engine.step()
    return Sample(
        prefill_s=ttft_s,
        first_step_s=0.0,  # `ttft_s` has the first step
        latencies_s=[latency for sequence in running for latency in meanwhile[sequence]],
        arrival=Arrival([latency for sequence in running for latency in before[sequence]], alone_s),
    )


def _step_until(
    engine: Engine,
    sequences: Sequence[EngineSequence],
    test: Test,
    *,
    until: Callable[[dict[EngineSequence, int]], bool],
) -> dict[EngineSequence, list[float]]:
    """Step the engine and return each sequence's inter-token latencies.

    engine: has no other requests.
    sequences: to wait for.
    test: named if a sequence ends.
    until: returns True for the numbers of steps at which to end.
    """
    latencies_s: dict[EngineSequence, list[float]] = {sequence: [] for sequence in sequences}
    while not until({sequence: len(latencies) for sequence, latencies in latencies_s.items()}):
        for sequence, event in engine.step():
            if isinstance(event, Step):
                latencies_s[sequence].append(event.record.latency_s)
            elif isinstance(event, Finished | SequenceFailed):
                raise EngineError(f"{test.label}: a sequence ended during the measurement")
    return latencies_s
