"""The result of `headrace quantize` for people.

tests/app/quantize/test_quantize.py reads the lines.
"""

from functools import partial

import click

from headrace.app.bench.show.phrases import bracketed
from headrace.app.model_info.model_report import format_text
from headrace.app.output.sanitise import sanitise
from headrace.app.output.tables import Column, print_table
from headrace.app.quantize.figures import QuantizedHere
from headrace.app.quantize.quantize import Quantized
from headrace.runtime.metrics.units import decimals, format_bytes, percent

_LABEL = 18  # cells


def show(quantized: Quantized) -> None:
    """Print the formats and the figures."""
    rows = quantized.figures.formats
    columns = [
        Column.of(rows, "FORMAT", lambda row: format_text(row.bits, row.group_size, row.mode), right=False),
        Column.of(rows, "PARTS", lambda row: str(row.parts)),
        Column.of(rows, "WEIGHTS", lambda row: f"{row.weights:,}"),
    ]
    print_table(columns, rule=False)
    click.echo()
    for label, text in figure_rows(quantized.figures):
        click.echo(f"{label.ljust(_LABEL)}{text}")
    click.echo(sanitise(f"{'Directory'.ljust(_LABEL)}{quantized.path}"))
    if quantized.name is not None:
        click.echo(sanitise(f"{'Run it'.ljust(_LABEL)}headrace run -m {quantized.name} PROMPT"))


def figure_rows(figures: QuantizedHere) -> list[tuple[str, str]]:
    """Return (label, text) of size, speed and quality."""
    predicted = figures.predicted
    kl = figures.kl
    top1 = figures.top1_agreement
    at_most = "at most " if predicted.bound else ""
    rows = [
        ("Bits a weight", f"{figures.bits_per_weight:.3f}, scales and norms included"),
        (
            "Weights",
            f"{format_bytes(figures.weight_bytes)}, before {format_bytes(figures.source_weight_bytes)}",
        ),
        ("Decode step", f"{format_bytes(figures.weight_bytes_per_step)} of weights"),
        (
            "Predicted",
            f"{at_most}{predicted.tokens_per_second:.1f} tok/s on {predicted.target} after "
            f"{predicted.context:,} tokens",
        ),
        ("Measured", f"{figures.measured_tokens_per_second:.1f} tok/s here, at the beginning of a context"),
        ("KL", f"{kl.value:.4f} nats{bracketed(kl, partial(decimals, digits=4))} from the given weights"),
        ("Top-1 agreement", f"{percent(top1.value, 1)}{bracketed(top1, partial(percent, digits=1))}"),
        ("Scored", f"{figures.scored_tokens:,} tokens of text that chose nothing; 95 % intervals"),
    ]
    if figures.leaves_head:
        rows.append(("Left out", "the multi-token prediction head; `headrace pull --quantize` keeps it"))
    return rows
