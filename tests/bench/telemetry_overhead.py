"""Cost of a step record relative to its step: `python -m tests.bench.telemetry_overhead [MODEL]`.

Times `Timeline.step_done` alone (back to back) and real decode steps of the model, and prints the share. The goal is
under 1 % of a step.
"""

import statistics
import sys
import time

from headrace.models.loading.load import load_model
from headrace.models.registry.resolve import resolve
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.engine.timeline import Timeline
from tests.support.alone import new_cache

RECORDS = 20_000
STEPS = 64


def main() -> None:
    resolved = resolve(sys.argv[1] if len(sys.argv) > 1 else None)
    loaded = load_model(resolved.path, name=resolved.name)
    engine = Engine(loaded.network, context_limit=loaded.context_limit)
    request = Request(loaded.tokenizer.encode_prompt("The quick brown fox"), max_tokens=STEPS)
    steps = [event.record.latency_s for event in engine.generate(request) if isinstance(event, Step)]
    step_s = statistics.median(steps[1:])

    cache = new_cache(loaded.network, 256)
    cache.reserve(2)
    cache.advance(2)
    cache.commit(2)
    timeline = Timeline(cost=loaded.network.cost, prompt_tokens=1)
    rounds = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(RECORDS // 5):
            timeline.step_done(cache)
        rounds.append((time.perf_counter() - started) / (RECORDS // 5))
    record_s = statistics.median(rounds)
    share = record_s / step_s
    print(f"{resolved.name}: record {record_s * 1e6:.2f} us, step {step_s * 1e3:.2f} ms, {share:.3%} of a step")


if __name__ == "__main__":
    main()
