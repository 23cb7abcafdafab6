"""Tokens per second in large digits, and the phase of the turn."""

from collections.abc import Iterable, Sequence
from typing import cast

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.renderables.digits import Digits

from headrace.app.answer.phrases import duration, rate_digits
from headrace.app.answer.sentence import sentence
from headrace.app.tui.metrics.facts import FirstToken
from headrace.app.tui.metrics.live import LiveMetrics, Phase
from headrace.app.tui.widgets.lines import Lines, fitting, spread
from headrace.runtime.metrics.units import format_bytes

_SMALL = 0.01  # smaller parts of TTFT are left out
_ORDER: tuple[Phase, ...] = ("load", "prefill", "decode", "idle")


class SpeedSection(Vertical):
    """The head of the decode view."""

    BORDER_TITLE = "decode speed"

    def __init__(self, metrics: LiveMetrics, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metrics = metrics
        self._frozen = False

    def compose(self) -> ComposeResult:
        with Horizontal(id="speed-row"):
            yield BigRate(self.metrics)
            yield SpeedFacts(self.metrics)
        yield PhaseStrip(self.metrics)

    def show(self, metrics: LiveMetrics, frozen: bool = False) -> None:
        self.metrics = metrics
        if not self.is_mounted:
            return
        if frozen != self._frozen:
            self._frozen = frozen
            self.border_subtitle = Content("❚❚ frozen") if frozen else Content("")
        self.query_one(BigRate).show(metrics)
        self.query_one(SpeedFacts).show(metrics)
        self.query_one(PhaseStrip).show(metrics)

    def on_mount(self) -> None:
        self.show(self.metrics)


class SentenceLines(Lines):
    """The sentence on the current steps, wrapped; the height grows with it and does not shrink."""

    _frozen = False

    def show(self, metrics: LiveMetrics, *, frozen: bool = False) -> None:
        self._frozen = frozen
        super().show(metrics)

    def change_key(self, metrics: LiveMetrics) -> object:
        return self._frozen, sentence(metrics.figures)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        mark = (" ❚❚ frozen, F7 continues ", "reverse $text-warning") if self._frozen else ""
        lines = Content.assemble(mark, " " * self._frozen, sentence(metrics.figures)).wrap(width)
        if len(lines) > height:
            self.styles.height = len(lines)
        return lines


class BigRate(Lines):
    """Tokens per second now, or of the last answer. A Digits widget would lay out the screen as it grows."""

    def change_key(self, metrics: LiveMetrics) -> object:
        return _big(metrics)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        bold = Style(bold=True)
        segments = cast("Iterable[Segment]", Digits(_big(metrics), bold).render(bold))
        return [Content("".join(part.text for part in line)) for line in Segment.split_lines(segments)]


class SpeedFacts(Lines):
    """Figures beside the digits."""

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        average, roofline = rate_digits(metrics.rate_average), rate_digits(metrics.roofline_rate)
        last = metrics.rate_now is None and metrics.rate_average is not None
        now, below = " last answer" if last else " now", (roofline, " roofline")
        if metrics.speculating and metrics.steps_rate is not None:
            below = (rate_digits(metrics.steps_rate), " steps/s")
        if metrics.batch is not None:
            now, below = " last answers" if last else " total", (rate_digits(metrics.batch.rate_each), " each")
        lines = (
            Content.assemble(("tok/s", "bold"), (now, "$quiet")),
            Content.assemble((average, "bold $text-primary"), (" average", "$quiet")),
            Content.assemble((below[0], "$quiet"), (below[1], "$quiet")),
        )
        return [line.truncate(width, ellipsis=True) for line in lines]


def _big(metrics: LiveMetrics) -> str:
    return rate_digits(metrics.rate_average if metrics.rate_now is None else metrics.rate_now)


class PhaseStrip(Lines):
    """Phases in order: done, current and to come; below, the current one's detail."""

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        return [phases(metrics, width), detail(metrics, width)]


def phases(metrics: LiveMetrics, width: int) -> Content:
    """Return the strip of phases. Marks and weights tell them apart, not colour alone."""
    if metrics.phase == "dead":
        return Content.styled("✗ the engine process is gone", "bold $text-error")
    if metrics.phase == "failed":
        return Content.styled("✗ no model is loaded", "bold $text-error")
    now = _ORDER.index(metrics.phase) if metrics.phase in _ORDER else -1
    pieces: list[Content | str] = []
    for place, name in enumerate(_ORDER):
        if place == now:
            style, mark = ("bold $text-accent", "●") if name != "idle" else ("bold $text-success", "●")
        elif place < now and (metrics.turns or name == "load" or metrics.phase != "idle"):
            style, mark = "$quiet", "✓"
        else:
            style, mark = "$faint", "○"
        if pieces:
            pieces.append(Content.styled(" ─ " if width >= 39 else " ", "$faint"))
        pieces.append(Content.styled(f"{mark} {name}", style))
    return Content.assemble(*pieces)


def detail(metrics: LiveMetrics, width: int) -> Content:
    """Return a line on the current phase: progress while loading or in prefill, times after."""
    if metrics.phase == "load":
        share = f" {metrics.load_share:.0%}" if metrics.load_share is not None else ""
        return Content.styled(f"{metrics.load_stage}{share}", "$quiet")
    if metrics.phase == "failed":
        return Content.styled("F8 tries again, F5 picks a model", "$quiet").truncate(width, ellipsis=True)
    if metrics.phase == "start" or (metrics.phase == "idle" and not metrics.turns):
        loaded = f"loaded in {metrics.model.load_s:.2f} s" if metrics.model.load_s else "nothing loaded yet"
        weights = format_bytes(metrics.model.weight_bytes) if metrics.model.weight_bytes else ""
        return spread(Content.styled(loaded, "$quiet"), Content.styled(weights, "$quiet"), width)
    if metrics.batch is not None:
        count, growing = len(metrics.batch.rows), metrics.batch.growing
        said = f"{growing} of {count} running" if growing else f"{count} answers"
        return Content.styled(f"{said} · {metrics.batch.tokens:,} tokens", "$quiet").truncate(width, ellipsis=True)
    if metrics.phase == "prefill" and metrics.prefill_total:
        filled = round(metrics.prefill_done / metrics.prefill_total * 10)
        text = f"{metrics.prefill_done}/{metrics.prefill_total} tokens "
        return Content.assemble((text, "$quiet"), ("━" * filled, "$accent"), ("─" * (10 - filled), "$faint"))
    return Content("") if metrics.first_token is None else _first_token(metrics.first_token, metrics, width)


def _first_token(first: FirstToken, metrics: LiveMetrics, width: int) -> Content:
    """Return TTFT and its longest parts that fit, then the prompt's tokens."""
    parts = [("TTFT", first.ttft_s), *(part for part in first.parts() if part[1] >= _SMALL * first.ttft_s)]
    pieces = [Content.assemble((f"{name} ", "$quiet"), duration(seconds)) for name, seconds in parts]
    if metrics.prefill_total:
        pieces.append(Content.styled(f"{metrics.prefill_total:,} tok", "$quiet"))
    if metrics.reused:
        pieces.append(Content.styled(f"{metrics.reused:,} cached", "$quiet"))
    return fitting(pieces, width)
