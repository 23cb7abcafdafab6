"""Processor time of answers with and without draft tokens, in turns, on machines that others use meanwhile.

python -m tests.bench.speculation_pairs [MODEL] [--rounds 5] [--threads 1] [--tokens N] [--workload edit,prose]

Each round answers every workload greedily and at temperature 1, with and without draft tokens, one right after the
other in alternating order. The gain is the ratio of processor times from the first token to the last. With one thread
no time is spent waiting for another one, so it is the ratio of speeds on an idle machine with one thread. --new gives
each answer an engine without measured costs, as the first answer of a machine has. Answers are compared by token.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import cast

from headrace.app.bench.measure.workloads import load_workloads
from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.resolve import resolve
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.ops import native
from headrace.runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer and its processor time from the first token to the last, in seconds."""

    tokens: list[int]
    seconds: float
    proposed: int
    accepted: int


def timed(engine: Engine, request: Request) -> Timed:
    """Answer the request. Answers before do not help it."""
    engine.forget_answers()
    tokens: list[int] = []
    proposed = 0
    accepted = 0
    began = 0.0
    ended = 0.0
    for event in engine.generate(request):
        if not isinstance(event, Step):
            continue
        ended = time.process_time()
        if not tokens:
            began = ended
        tokens += event.tokens
        proposed += event.record.proposed
        accepted += event.record.accepted
    return Timed(tokens, ended - began, proposed, accepted)


def new_engine(model: LoadedModel) -> Engine:
    return Engine(model.network, context_limit=model.context_limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=cast(str, __doc__).splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--workload", help="names, separated by commas")
    parser.add_argument("--new", action="store_true")
    options = parser.parse_args()
    if native.status().available:
        native.set_threads(options.threads)
    model = load_resolved(resolve(options.model))
    prompts = ChatPrompt(model.tokenizer)
    engine = new_engine(model)
    workloads = load_workloads()
    names = options.workload.split(",") if options.workload else list(workloads)
    gains: dict[tuple[str, float], list[float]] = {}
    for number in range(options.rounds):
        for name in names:
            for temperature in (0.0, 1.0):
                workload = workloads[name]
                answers: dict[str, Timed] = {}
                for speculate in ("auto", "off") if number % 2 else ("off", "auto"):
                    if options.new:
                        engine = new_engine(model)
                    request = Request(
                        prompts.encode(workload.messages),
                        min(options.tokens, workload.max_tokens),
                        SamplingParams(temperature=temperature, seed=1),
                        model.tokenizer.eos_ids,
                        speculate="off" if speculate == "off" else "auto",
                    )
                    answers[speculate] = timed(engine, request)
                plain = answers["off"]
                drafted = answers["auto"]
                assert plain.tokens == drafted.tokens, f"{name} at {temperature:g}: draft tokens changed the answer"
                gains.setdefault((name, temperature), []).append(plain.seconds / drafted.seconds)
                all_gains = gains[name, temperature]
                print(
                    f"{name:8} at {temperature:g}: {len(plain.tokens):4} tokens, {median(all_gains):5.3f}x"
                    f" ({min(all_gains):5.3f} to {max(all_gains):5.3f}), {drafted.accepted} of {drafted.proposed}"
                    f" draft tokens accepted, {1e3 * plain.seconds / max(1, len(plain.tokens) - 1):.2f} ms a token",
                    flush=True,
                )
    costs = ", ".join(
        f"{1 + count} rows at {context}: {ratio:.2f} ({passes})"
        for (sequences, count, context), (ratio, passes) in sorted(engine._drafting.controller.measured.items())
        if sequences == 1
    )
    print(f"measured costs: {costs}")


if __name__ == "__main__":
    main()
