"""Speculative decoding: accepted tokens per step, speed, bytes per token, acceptance over time.

Computed from the steps of the turn. A step emits its accepted draft tokens and one more.
"""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.phrases import rate_digits
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import StepTotals, totals_of
from headrace.app.tui.widgets.lines import Section, spread
from headrace.runtime.metrics.telemetry import StepRecord
from headrace.runtime.metrics.units import format_bytes

_LEVELS = "▁▂▃▄▅▆▇█"
_NAME = 7  # cells of a source's name and a space
_SHARE = 6  # of its acceptance in all


def speculation_totals(records: Sequence[StepRecord]) -> StepTotals | None:
    """Return the totals; None if no step had draft tokens."""
    totals = totals_of(records)
    return totals if totals.proposed else None


class SpeculationSection(Section):
    """Three lines of figures, and acceptance over time for each source of draft tokens."""

    TITLE = "speculation"

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        records = list(metrics.steps)
        found = speculation_totals(records)
        if found is None:
            return [Content.styled("no draft tokens in this answer", "$faint")]
        share = f"{found.acceptance:.0%}" if found.acceptance is not None else "–"
        lines = [
            spread(
                Content.assemble((f"{found.accepted_per_step:.2f}", "bold"), (" accepted per step", "$quiet")),
                Content.assemble((share, "bold $text-primary"), (" accepted", "$quiet")),
                width,
            ),
            spread(
                Content.assemble(
                    ("tok/s ", "$quiet"), (rate_digits(found.tokens_per_second), "bold"),
                    ("  steps/s ", "$quiet"), (rate_digits(found.steps_per_second), "bold"),
                ),
                Content.assemble((f"{found.tokens / found.steps:.2f}", "bold"), (" tok/step", "$quiet")),
                width,
            ),
            Content.assemble(
                (format_bytes(round(found.nbytes / found.tokens)), "bold"),
                (f"/token, {format_bytes(round(found.nbytes / found.steps))}/step", "$quiet"),
            ).truncate(width),
        ]  # fmt: skip
        sources = dict.fromkeys(record.source for record in records if record.source)
        for source in list(sources)[: max(0, height - len(lines))]:
            lines.append(_over_time(source, records, width))
        return lines


def _over_time(source: str, records: Sequence[StepRecord], width: int) -> Content:
    """Return a source's acceptance over the turn, the newest step at the right; blank without draft tokens."""
    own = [record if record.source == source else None for record in records]
    proposed = sum(record.proposed for record in own if record)
    accepted = sum(record.accepted for record in own if record)
    cells = acceptance_cells(own, max(1, width - _NAME - _SHARE))
    share = f"{accepted / proposed:.0%}" if proposed else "–"
    return Content.assemble((f"{source:<{_NAME}}", "$quiet"), (cells, "$accent"), (f"{share:>{_SHARE}}", "bold"))


def acceptance_cells(steps: Sequence[StepRecord | None], width: int) -> str:
    """Return `width` cells over the steps; the height of each is the acceptance. None: a step that is not counted."""
    said = []
    for cell in range(width):
        part = steps[cell * len(steps) // width : (cell + 1) * len(steps) // width]
        proposed = sum(step.proposed for step in part if step)
        accepted = sum(step.accepted for step in part if step)
        said.append(_LEVELS[round(accepted / proposed * (len(_LEVELS) - 1))] if proposed else " ")
    return "".join(said)
