"""Achieved bandwidth against its peaks, MBU, and the bytes of a step."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.phrases import mbu_text
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import moving_share
from headrace.app.tui.widgets.lines import Section, bar, spread
from headrace.runtime.metrics.units import format_bytes


class BandwidthSection(Section):
    """A gauge with the peaks marked in it; computed from shapes and latencies."""

    TITLE = "memory bandwidth (computed)"

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        achieved, share = metrics.achieved_gb_s, metrics.mbu
        self.set_subtitle("above the measured memory: caches" if share is not None and share > 1 else "")
        shown = f"{share:.1%}" if share is not None else mbu_text(None, busy=metrics.busy)
        head = spread(
            Content.assemble((_gb_s(achieved), "bold"), (" GB/s achieved", "$quiet")),
            Content.assemble(("MBU ", "$quiet"), (shown, "bold $text-primary")),
            width,
        )
        lines = [head, _gauge(metrics, width), _scale(metrics, width)]
        lines += _bytes_per_step(metrics, width)
        if height > len(lines) + 1:
            lines += _growth(metrics, width)
        return lines


def _gauge(metrics: LiveMetrics, width: int) -> Content:
    """0 to the higher ceiling; ┃ is the measured peak, ╎ the nominal one."""
    machine = metrics.machine
    top = _top(metrics)
    if top is None:
        return bar(0.0, width, "$primary")
    line = bar((metrics.achieved_gb_s or 0.0) / top, width, "$primary")
    for peak, mark in ((machine.nominal_gb_s, "╎"), (machine.measured_gb_s, "┃")):
        if peak:
            at = min(width - 1, max(0, round(peak / top * width) - 1))
            line = Content.assemble(line[:at], (mark, "bold $text-warning"), line[at + 1 :])
    return line


def _scale(metrics: LiveMetrics, width: int) -> Content:
    machine = metrics.machine
    now = f", now {_gb_s(machine.memory_gb_s)}" if machine.memory_gb_s else ""
    measured = f"┃ measured {_gb_s(machine.measured_gb_s)}{now}"
    nominal = f"╎ nominal {_gb_s(machine.nominal_gb_s) if machine.nominal_gb_s else 'unknown'}"
    return spread(Content.styled(measured, "$text-warning"), Content.styled(nominal, "$quiet"), width)


def _bytes_per_step(metrics: LiveMetrics, width: int) -> list[Content]:
    last, share = metrics.last, moving_share(metrics.steps)
    if last is None or share is None:
        weights = metrics.model.weight_bytes
        size = format_bytes(weights)
        forms = (f"a step reads {size} of weights + KV", f"a step: {size} + KV", f"{size} + KV")
        text = next((form for form in forms if len(form) <= width), "")
        return [Content.styled(text if weights else "", "$quiet")]
    cells = max(0, min(width, round(share * width) or (1 if share > 0 else 0)))
    split = Content.assemble(("█" * (width - cells), "$secondary"), ("▒" * cells, "$accent"))
    legend = spread(
        Content.assemble(("█ ", "$secondary"), "weights ", (format_bytes(last.weight_bytes), "bold")),
        Content.assemble(("▒ ", "$accent"), "KV ", (format_bytes(last.step_bytes - last.weight_bytes), "bold")),
        width,
    )
    return [split, legend]


def _growth(metrics: LiveMetrics, width: int) -> list[Content]:
    """Return the change of a step's bytes over the turn."""
    if len(metrics.steps) < 2:
        return []
    first, last = metrics.steps[0], metrics.steps[-1]
    text = f"per step {format_bytes(first.step_bytes)} → {format_bytes(last.step_bytes)} at {last.context} tokens"
    return [Content.styled(text, "$quiet").truncate(width)]


def _top(metrics: LiveMetrics) -> float | None:
    peaks = [peak for peak in (metrics.machine.measured_gb_s, metrics.machine.nominal_gb_s) if peak]
    return max([*peaks, metrics.achieved_gb_s or 0.0]) if peaks else None


def _gb_s(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 999.5 else f"{value:.0f}"
