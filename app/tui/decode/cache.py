"""The KV cache: bytes used and allocated on the scale of the context limit, and how long it lasts."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, spread
from headrace.runtime.metrics.units import format_bytes

_NOT_FED = 8  # tokens at the end of a conversation that are fed with the next question


class CacheSection(Section):
    """Tokens of the conversation; its used bytes within the allocated ones within the limit."""

    TITLE = "context"
    NAME = "context"
    LEAST, MOST = 5, 6

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        fill, model = metrics.fill, metrics.model
        used, allocated = fill.used_bytes, fill.allocated_bytes
        limit = model.kv_bytes_at_limit
        limit = max(limit, allocated) if limit else 0  # the last block held may end past the last token
        subtitle = f"─ limit {format_bytes(limit)}" if limit else ""
        self.set_subtitle(subtitle)
        if not model.name:  # zero bytes would be a figure
            return [Content.styled("no model yet", "$quiet")]
        tokens = Content.assemble(
            (f"{metrics.context:,}", "bold"),
            (f" of {model.context_limit:,} tokens" if model.context_limit else " tokens", "$quiet"),
        )
        size = f"{format_bytes(model.kv_bytes_per_token)}/token"
        named = f"{size} as {model.kv_format}" if model.kv_format else size
        each = Content.styled(named if tokens.cell_length + len(named) < width else size, "$quiet")
        if metrics.phase == "idle" and fill.tokens + _NOT_FED < metrics.context:
            each = Content.styled(f"{fill.tokens:,} cached", "$text-warning")
        lines = [
            spread(tokens, each, width),
            _levels(used, allocated, limit, width),
            _legend(used, allocated, width),
        ]
        if height > len(lines):
            lines.append(_until_full(metrics, width))
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


def _until_full(metrics: LiveMetrics, width: int) -> Content:
    """Return the free tokens of the context and the time until it is full at the current speed."""
    left = metrics.model.context_limit - metrics.context
    if not metrics.model.context_limit or left <= 0:
        return Content.styled("the context is full" if metrics.model.context_limit else "", "bold $text-warning")
    tokens = Content.assemble((f"{left:,}", "bold"), (" more until full", "$quiet"))
    seconds = seconds_until_full(metrics)
    time = Content.styled(f"{_roughly(seconds)} of decoding" if seconds is not None else "", "$quiet")
    return spread(tokens, time, width)


def seconds_until_full(metrics: LiveMetrics) -> float | None:
    """Return the seconds of decoding up to the context limit; None if the speed is unknown."""
    cost, achieved = metrics.model.cost, metrics.history.token_gb_s
    if cost is None or not achieved:
        return None
    here, limit = metrics.context, metrics.model.context_limit
    mean = (cost.step_bytes(here) + cost.step_bytes(max(here, limit - 1))) / 2  # bytes grow evenly, or hardly at all
    return max(0, limit - here) * mean / (achieved * 1e9)


def _roughly(seconds: float) -> str:
    """`40 s`, `3 min`, `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
