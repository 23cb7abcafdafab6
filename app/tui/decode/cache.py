"""The KV cache: bytes used, allocated and at the context limit, tokens, and how it grew."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.decode.braille import bars
from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.decode.section import Section, spread
from headrace.runtime.units import format_bytes


class CacheSection(Section):
    """Used within allocated within the limit, all three on one line."""

    TITLE = "KV cache"

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        fill, model = metrics.fill, metrics.model
        used, allocated = fill.used_bytes, fill.allocated_bytes
        limit = model.kv_bytes_per_token * model.context_limit
        subtitle = f"─ limit {format_bytes(limit)}" if limit else ""
        if str(self.border_subtitle or "") != subtitle:
            self.border_subtitle = Content(subtitle)
        tokens = Content.assemble(
            (f"{fill.tokens:,}", "bold"),
            (f" of {model.context_limit:,} tokens" if model.context_limit else " tokens", "$quiet"),
        )
        each = Content.styled(f"{format_bytes(model.kv_bytes_per_token)}/token", "$quiet")
        lines = [
            spread(tokens, each, width),
            _levels(used, allocated, limit, width),
            _legend(used, allocated, width),
        ]
        room = height - len(lines)
        if room >= 1 and len(metrics.steps) > 1:
            lines += [Content.styled(text, "$accent") for text in _growth(metrics, width, min(room, 4))]
        return lines


def _levels(used: int, allocated: int, limit: int, width: int) -> Content:
    """█ used, ▒ allocated beyond it, ─ up to the context limit."""
    top = max(limit, allocated, 1)
    full = min(width, round(used / top * width) or (1 if used else 0))
    reserved = min(width, round(allocated / top * width) or (1 if allocated else 0))
    ahead = max(0, reserved - full)
    return Content.assemble(
        ("█" * full, "$accent"), ("▒" * ahead, "$accent 60%"), ("─" * (width - full - ahead), "$foreground 20%")
    )


def _legend(used: int, allocated: int, width: int) -> Content:
    return spread(
        Content.assemble(("█ ", "$accent"), "used ", (format_bytes(used), "bold")),
        Content.assemble(("▒ ", "$accent 60%"), "held ", (format_bytes(allocated), "bold")),
        width,
    )


def _growth(metrics: LiveMetrics, width: int, height: int) -> list[str]:
    """Bytes in use over the turn's kept steps, zero baseline, resampled to the width."""
    steps = metrics.steps
    count = 2 * width
    values = [float(steps[place * (len(steps) - 1) // (count - 1)].kv_used_bytes) for place in range(count)]
    return bars(values, max(values) * 1.05, width, height)
