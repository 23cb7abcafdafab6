"""Workload figures with and without speculation, for the JSON document (docs/bench-json.md)."""

from collections.abc import Mapping, Sequence

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Repetition
from headrace.app.bench.measure.workloads import load_workloads
from headrace.app.bench.stats import bootstrap, median
from headrace.app.output.document import Document


def speculation_of(test: Test, repetitions: Sequence[Repetition]) -> Document | None:
    """Return one workload's figures, the ratio paired by repetition. None for other tests and for peers."""
    pairs = [repetition.sample.pair for repetition in repetitions if repetition.sample.pair is not None]
    if not pairs:
        return None
    workload = load_workloads()[test.workload]
    ratios = [pair.on.tokens_per_second / pair.off.tokens_per_second for pair in pairs]
    steps, tokens = (sum(getattr(pair.on, name) for pair in pairs) for name in ("steps", "tokens"))
    proposed, accepted, tried = (
        sum(getattr(pair.on, name) for pair in pairs) for name in ("proposed", "accepted", "tried")
    )
    return {
        "workload": workload.name,
        "kind": workload.kind,
        "temperature": test.temperature,
        "plain_tokens_per_second": _spread([pair.off.tokens_per_second for pair in pairs]),
        "ratio": _spread(ratios),
        "proposed": proposed,
        "accepted": accepted,
        "acceptance": accepted / proposed if proposed else None,
        "chance": accepted / tried if tried else None,
        "proposed_per_step": proposed / steps,
        "accepted_per_step": accepted / steps,
        "tokens_per_step": tokens / steps,
        "sources": sorted({source for pair in pairs for source in pair.sources}),
        "same_tokens": all(pair.same for pair in pairs),
    }


def identity(results: Sequence[Document], expected: Mapping[str, tuple[bool, str]]) -> Document | None:
    """Report whether speculation changed tokens, if measured. expected: by model, (must be equal, reason).

    broken: a must-be-equal answer differed.
    """
    entries = [entry for entry in results if entry["speculation"] is not None]
    if not entries:
        return None
    differs = [entry for entry in entries if not entry["speculation"]["same_tokens"]]
    broken = [entry for entry in differs if expected[entry["model"]][0]]
    return {
        "expected": {model: {"same": same, "reason": reason} for model, (same, reason) in expected.items()},
        "tests": len(entries),
        "same": len(entries) - len(differs),
        "differs": [f"{entry['model']} {entry['test']}" for entry in differs],
        "broken": [f"{entry['model']} {entry['test']}" for entry in broken],
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    low, high = bootstrap(values, median)
    return {"median": median(values), "low": low, "high": high}
