"""Achieved bandwidth against the measured and the nominal peak, MBU, and what a step's bytes are made of."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.decode.figures import LiveFigures, moving_share
from headrace.app.tui.decode.section import Section, bar, spread
from headrace.runtime.units import format_bytes


class BandwidthSection(Section):
    """A gauge with the ceilings drawn into it; figures are computed from shapes and latencies."""

    TITLE = "memory bandwidth (computed)"

    def lines(self, figures: LiveFigures, width: int, height: int) -> Sequence[Content]:
        achieved, share = figures.achieved_gb_s, figures.mbu
        head = spread(
            Content.assemble((_gb_s(achieved), "bold"), (" GB/s achieved", "$quiet")),
            Content.assemble(("MBU ", "$quiet"), (f"{share:.1%}" if share is not None else "–", "bold $text-primary")),
            width,
        )
        lines = [head, _gauge(figures, width), _scale(figures, width)]
        lines += _bytes_per_step(figures, width)
        if height > len(lines) + 1:
            lines += _growth(figures, width)
        return lines


def _gauge(figures: LiveFigures, width: int) -> Content:
    """0 to the higher ceiling; ┃ is the measured peak, ╎ the nominal one."""
    machine = figures.machine
    top = _top(figures)
    if top is None:
        return bar(0.0, width, "$primary")
    line = bar((figures.achieved_gb_s or 0.0) / top, width, "$primary")
    for peak, mark in ((machine.nominal_gb_s, "╎"), (machine.measured_gb_s, "┃")):
        if peak:
            at = min(width - 1, round(peak / top * width) - 1)
            line = Content.assemble(line[:at], (mark, "bold $text-warning"), line[at + 1 :])
    return line


def _scale(figures: LiveFigures, width: int) -> Content:
    machine = figures.machine
    measured = f"┃ measured {_gb_s(machine.measured_gb_s)}"
    nominal = f"╎ nominal {_gb_s(machine.nominal_gb_s) if machine.nominal_gb_s else 'unknown'}"
    return spread(Content.styled(measured, "$text-warning"), Content.styled(nominal, "$quiet"), width)


def _bytes_per_step(figures: LiveFigures, width: int) -> list[Content]:
    last, share = figures.last, moving_share(figures.steps)
    if last is None or share is None:
        weights = figures.model.weight_bytes
        text = f"a step reads {format_bytes(weights)} of weights + KV" if weights else ""
        return [Content.styled(text, "$quiet").truncate(width)]
    cells = max(0, min(width, round(share * width) or (1 if share > 0 else 0)))
    split = Content.assemble(("█" * (width - cells), "$secondary"), ("▒" * cells, "$accent"))
    legend = spread(
        Content.assemble(("█ ", "$secondary"), "weights ", (format_bytes(last.weight_bytes), "bold")),
        Content.assemble(("▒ ", "$accent"), "KV ", (format_bytes(last.step_bytes - last.weight_bytes), "bold")),
        width,
    )
    return [split, legend]


def _growth(figures: LiveFigures, width: int) -> list[Content]:
    """How a step's bytes moved over the turn."""
    if len(figures.steps) < 2:
        return []
    first, last = figures.steps[0], figures.steps[-1]
    text = f"per step {format_bytes(first.step_bytes)} → {format_bytes(last.step_bytes)} at {last.context} tokens"
    return [Content.styled(text, "$quiet").truncate(width)]


def _top(figures: LiveFigures) -> float | None:
    peaks = [peak for peak in (figures.machine.measured_gb_s, figures.machine.nominal_gb_s) if peak]
    return max([*peaks, figures.achieved_gb_s or 0.0]) if peaks else None


def _gb_s(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 999.5 else f"{value:.0f}"
