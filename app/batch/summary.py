"""Summary of a batch: one JSON document, or a few lines for people, with the same figures.

TTFT and end-to-end times of a line count from its tokenization, not from the batch's start. The total speed covers all
answers together, prefill included.

Guard: tests/app/cli/test_batch.py.
"""

from collections.abc import Sequence

from msgspec import Struct

from headrace.app.answer.answer import sampling_document
from headrace.app.answer.options import SamplingSource
from headrace.app.answer.phrases import sampling_phrase
from headrace.app.batch.run_batch import Tally
from headrace.app.output.sanitise import sanitise
from headrace.app.output.tables import Column
from headrace.runtime.metrics.telemetry import Percentiles, in_milliseconds
from headrace.runtime.metrics.units import format_seconds, percent, three_digits
from headrace.runtime.sampling.params import SamplingParams


class BatchReport(Struct, frozen=True):
    """Facts of a finished batch.

    model: its name.
    parallel: requests at a time.
    sampling, sampling_source: of lines without their own.
    tally: counts and times.
    kernels, versions: as in other documents.
    """

    model: str
    parallel: int
    sampling: SamplingParams
    sampling_source: SamplingSource
    tally: Tally
    kernels: dict[str, str]
    versions: dict[str, str]


def document(report: BatchReport) -> dict[str, object]:
    """Return the `--json` document. Absent figures are null."""
    tally = report.tally
    return {
        "model": report.model,
        "parallel": report.parallel,
        "sampling": sampling_document(report.sampling),
        "sampling_source": report.sampling_source,
        "lines": tally.total,
        "answered": tally.answered,
        "failed": tally.failed,
        "kept": tally.kept,
        "left": tally.remaining,
        "wall_s": tally.wall_s,
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "completion_tokens": tally.completion_tokens,
        "proposed_tokens": tally.proposed_tokens,
        "accepted_tokens": tally.accepted_tokens,
        "tokens_per_second": tally.tokens_per_second,
        "answers_per_second": tally.answers_per_second,
        **{f"{name}_ms": in_milliseconds(Percentiles.of(values)) for name, values in _waits(tally).items()},
        "kernels": report.kernels,
        "versions": report.versions,
    }


def sentences(report: BatchReport) -> list[str]:
    """Return counts, speed and the first errors as lines of text."""
    tally = report.tally
    counts = [f"{tally.answered} answered"]
    others = ((tally.failed, "failed"), (tally.kept, "kept from before"), (tally.remaining, "left"))
    counts += [f"{count} {state}" for count, state in others if count]
    lines = [f"{tally.total} {'line' if tally.total == 1 else 'lines'}: {', '.join(counts)}"]
    if tally.answered:
        speed = f"{three_digits(tally.tokens_per_second)} tok/s in total, {report.parallel} at a time"
        tokens = f"{tally.prompt_tokens} prompt and {tally.completion_tokens} completion tokens"
        lines.append(f"{tokens} in {format_seconds(tally.wall_s)}: {speed}")
        lines.append(f"lines without their own sampling: {sampling_phrase(report.sampling, report.sampling_source)}")
    if tally.proposed_tokens:
        share = tally.accepted_tokens / tally.proposed_tokens
        lines.append(f"{tally.accepted_tokens} of {tally.proposed_tokens} draft tokens accepted ({percent(share)})")
    shown = [sanitise(f"line {number}: {error}") for number, error in tally.errors]
    if tally.failed > len(shown):
        shown.append(f"and {tally.failed - len(shown)} more, in the results")
    return lines + shown


def waits_table(report: BatchReport) -> Sequence[Column]:
    """Return p50 and p95 of the latencies as columns; none without answers."""
    percentiles = {name: Percentiles.of(values) for name, values in _waits(report.tally).items()}
    rows = {_NAMES[name]: waits for name, waits in percentiles.items() if waits is not None}
    if not rows:
        return []
    return [
        Column("", list(rows), right=False),
        Column("p50", [format_seconds(waits.p50) for waits in rows.values()]),
        Column("p95", [format_seconds(waits.p95) for waits in rows.values()]),
    ]


_NAMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "end to end"}  # shown for each key of `_waits`


def _waits(tally: Tally) -> dict[str, Sequence[float]]:
    return {"ttft": tally.ttft_s, "itl": tally.latencies, "e2e": tally.e2e_s}
