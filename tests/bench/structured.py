"""Cost of structured output: masks, and decoding with a grammar against decoding without, paired.

    python -m tests.bench.structured [MODEL] [--rounds 9] [--tokens 150]

A grammar that allows any text gives the tokens of the free answer, so each round's ratio of the two is the cost of
masks alone. An answer with a schema has text without an alternative, too, which comes several tokens per step. Pairs
are interleaved, and the medians of their ratios count. A benchmark for people: nothing here passes or fails.
"""

import argparse
import json
import statistics
import time
from typing import Any

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import AnswerOptions
from headrace.models.loading.load import load_resolved
from headrace.models.registry.resolve import resolve
from headrace.models.text.structured.grammar_source import GrammarSource

_QUESTION = "List five long rivers of the world with their length and country."
_RIVER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "length_km": {"type": "integer", "minimum": 0, "maximum": 9999},
        "country": {"type": "string", "maxLength": 30},
    },
    "required": ["name", "length_km", "country"],
    "additionalProperties": False,
}
_SCHEMA = {
    "type": "object",
    "properties": {"rivers": {"type": "array", "items": _RIVER, "minItems": 3, "maxItems": 5}},
    "required": ["rivers"],
    "additionalProperties": False,
}
_RIVERS = [{"name": "Amazon", "length_km": 6400, "country": "Brazil"}] * 5


def masks(answerer: Answerer) -> list[float]:
    """Return the seconds of each mask of a typical answer."""
    grammars = answerer._grammars
    found = list[float]()
    for _ in range(3):
        constraint = grammars.compile(GrammarSource("schema", json.dumps(_SCHEMA))).start()
        for token in grammars.trie(json.dumps({"rivers": _RIVERS}, separators=(",", ":"))):
            started = time.perf_counter()
            constraint.masks([])
            found.append(time.perf_counter() - started)
            constraint.accept([token])
    return sorted(found)


def answered(answerer: Answerer, **options: Any) -> tuple[float, Answer]:
    """Return the decode seconds of one answer, and the answer."""
    prompt = answerer.encode([{"role": "user", "content": _QUESTION}])
    answer = answerer.prepare(prompt, AnswerOptions(temperature=0.0, **options))
    for _ in answerer.stream(answer):
        pass
    return sum(answer.latencies), answer


def per_token(seconds: float, answer: Answer) -> float:
    """Return the decode seconds of a token."""
    return max(seconds, 1e-9) / max(1, answer.end.summary.completion_tokens)


def main() -> None:
    """Measure and report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--tokens", type=int, default=150)
    given = options.parse_args()
    answerer = Answerer(load_resolved(resolve(given.model)))
    started = time.perf_counter()
    _ = answerer._grammars.trie.built
    print(f"vocabulary of {len(answerer._grammars.trie.tokens)} tokens: {time.perf_counter() - started:.2f} s, once")
    found = masks(answerer)
    p50, p95 = (found[int(len(found) * share)] * 1e6 for share in (0.5, 0.95))
    print(f"masks: p50 {p50:.0f} us, p95 {p95:.0f} us, of {len(found)}")
    ratios = list[float]()
    speedups = list[float]()
    for _ in range(given.rounds):
        free_s, free = answered(answerer, max_tokens=given.tokens, speculate="off")
        any_s, same = answered(answerer, max_tokens=given.tokens, speculate="off", regex="(.|\n)*")
        fits_s, fits = answered(answerer, max_tokens=given.tokens, speculate="off", schema=_SCHEMA)
        ratios.append(per_token(free_s, free) / per_token(any_s, same))
        speedups.append(per_token(free_s, free) / per_token(fits_s, fits))
    steps = fits.end.summary.steps
    tokens = fits.end.summary.completion_tokens
    print(f"decode speed with a grammar of any text against free: {statistics.median(ratios):.3f}")
    print(f"decode speed with a schema against free: {statistics.median(speedups):.3f}")
    print(f"the answer with a schema: {tokens} tokens in {steps} steps")


if __name__ == "__main__":
    main()
