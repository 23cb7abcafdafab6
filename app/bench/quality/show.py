"""A quality document as table or Markdown.

`bench --quality` prints it. A new figure of `QualityResult` is a row of `_columns`.

Guard: tests/app/bench/quality/test_quality_run.py.
"""

from collections.abc import Callable

from msgspec import UNSET
from rich.text import Text

from headrace.app.bench.measure.setup import setup_line
from headrace.app.bench.quality.figures import QualityResult
from headrace.app.bench.quality.quality_run import QualityDocument
from headrace.app.bench.show.formats import model_line
from headrace.app.bench.show.phrases import interval
from headrace.app.bench.stats import Figure
from headrace.app.output.document import markdown_table
from headrace.app.output.tables import Column, print_lines, print_table
from headrace.runtime.metrics.units import format_bytes, percent

_Cell = Callable[[QualityResult], str]


def show(document: QualityDocument) -> None:
    """Print the table of results and the circumstances."""
    results = document.results
    columns = [
        Column.of(results, name, cell, leaves, right=name not in ("", "at")) for name, leaves, cell in _columns()
    ]
    print_table(columns)
    print_lines([Text(line) for line in circumstances(document)])


def markdown(document: QualityDocument) -> str:
    """Return the same in Markdown, to paste into an issue."""
    columns = _columns()
    rows = [[cell(entry) for _, _, cell in columns] for entry in document.results]
    lines = markdown_table([name for name, _, _ in columns], rows, left=2)
    return "\n".join([*lines, "", *(f"- {line}" for line in circumstances(document))])


def circumstances(document: QualityDocument) -> list[str]:
    """Return lines on reference, text and settings."""
    perplexity = document.results[0].reference_perplexity
    text = document.text
    kernels = document.device.kernels_name
    lines = [f"reference: {model_line(document.reference)}; perplexity {perplexity:.2f}"]
    lines += [f"compared with it: {model_line(model)}" for model in document.against]
    if document.engines is not UNSET:
        lines += map(setup_line, document.engines)
    lines.append(
        f"{document.scored:,} tokens of {text.file} (sha256 {text.sha256[:12]}) scored at every depth, fed as "
        f"prefill chunks and as decode steps, {kernels} kernels; KL(reference || other) in nats; 95 % intervals from "
        f"blocks of {document.block} tokens"
    )
    lines += document.notes
    if document.interrupted:
        lines.append("interrupted: depths or phases are missing")
    return lines


def _columns() -> list[tuple[str, int, _Cell]]:
    """Return (heading, priority to leave when narrow, cell) per column."""
    return [
        ("", 0, lambda entry: entry.variant),
        ("at", 0, _condition),
        ("KL mean", 0, lambda entry: _nats(entry.kl_mean.value)),
        ("95 %", 4, lambda entry: _interval(entry.kl_mean, _nats)),
        ("KL p99", 1, lambda entry: _nats(entry.kl_p99.value)),
        ("95 %", 7, lambda entry: _interval(entry.kl_p99, _nats)),
        ("top-1 equal", 2, lambda entry: percent(entry.top1_agreement.value, 1)),
        ("95 %", 6, lambda entry: _interval(entry.top1_agreement, lambda value: percent(value, 1))),
        ("perplexity", 3, lambda entry: f"{entry.perplexity_ratio.value:.4f}x"),
        ("95 %", 5, lambda entry: _interval(entry.perplexity_ratio, lambda value: f"{value:.4f}")),
        ("tok/s", 9, lambda entry: _speed(entry.tokens_per_second)),
        ("bytes", 8, _bytes),
    ]


def _condition(entry: QualityResult) -> str:
    if entry.depth is None:
        return "all"
    return f"d{entry.depth} {entry.phase}"


def _nats(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0.01:
        return f"{value:.2g}"
    return f"{value:.3f}"


def _interval(figure: Figure, form: Callable[[float], str]) -> str:
    return interval(figure, form, "–")


def _speed(value: float | None) -> str:
    """Return the speed of scoring, with logits of every row."""
    return "" if value is None else f"{value:,.0f}"


def _bytes(entry: QualityResult) -> str:
    """Return the bytes it takes: of K/V per token with the ratio to the reference's, or of weights per step."""
    if entry.weight_bytes_per_step is None:
        return ""
    if entry.kind == "weights":
        return f"{format_bytes(entry.weight_bytes_per_step)} per step"
    return f"{format_bytes(entry.kv_bytes_per_token)} per token, {entry.kv_bytes_ratio:.2f}x"
