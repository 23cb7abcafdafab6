"""Tokens per second in large digits: now and average, and where the turn stands (the phase strip)."""

from collections.abc import Iterable, Sequence
from typing import cast

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.renderables.digits import Digits

from headrace.app.tui.decode.figures import LiveFigures, Phase
from headrace.app.tui.decode.section import Lines, spread
from headrace.runtime.units import format_bytes

_ORDER: tuple[Phase, ...] = ("load", "prefill", "decode", "idle")


class SpeedSection(Vertical):
    """The head of the decode view."""

    BORDER_TITLE = "decode speed"

    def __init__(self, figures: LiveFigures, id: str | None = None) -> None:
        super().__init__(id=id)
        self.figures = figures
        self._frozen = False

    def compose(self) -> ComposeResult:
        with Horizontal(id="speed-row"):
            yield BigRate(self.figures)
            yield SpeedFacts(self.figures)
        yield PhaseStrip(self.figures)

    def show(self, figures: LiveFigures, frozen: bool = False) -> None:
        self.figures = figures
        if not self.is_mounted:
            return
        if frozen != self._frozen:
            self._frozen = frozen
            self.border_subtitle = Content("❚❚ frozen") if frozen else Content("")
        self.query_one(BigRate).show(figures)
        self.query_one(SpeedFacts).show(figures)
        self.query_one(PhaseStrip).show(figures)

    def on_mount(self) -> None:
        self.show(self.figures)


class BigRate(Lines):
    """Tokens per second now. No Digits widget: one whose text gets longer lays the screen out anew."""

    def news(self, figures: LiveFigures) -> object:
        return rate_text(figures.rate_now)

    def lines(self, figures: LiveFigures, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        bold = Style(bold=True)
        segments = cast("Iterable[Segment]", Digits(rate_text(figures.rate_now), bold).render(bold))
        return [Content("".join(part.text for part in line)) for line in Segment.split_lines(segments)]


class SpeedFacts(Lines):
    """What stands beside the digits."""

    def lines(self, figures: LiveFigures, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        average, roofline = rate_text(figures.rate_average), rate_text(figures.roofline_rate)
        return [
            Content.assemble(("tok/s", "bold"), (" now", "$quiet")),
            Content.assemble((average, "bold $text-primary"), (" average", "$quiet")),
            Content.assemble((roofline, "$quiet"), (" roofline", "$quiet")),
        ]


class PhaseStrip(Lines):
    """load → prefill → decode → idle: what is done, what goes on, and for how long."""

    def lines(self, figures: LiveFigures, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        return [phases(figures, width), detail(figures, width)]


def rate_text(rate: float | None) -> str:
    """A rate with the digits that mean something: 9.84, 96.1, 212."""
    if rate is None:
        return "–"
    return f"{rate:.2f}" if rate < 9.995 else f"{rate:.1f}" if rate < 99.95 else f"{rate:.0f}"


def phases(figures: LiveFigures, width: int) -> Content:
    """The strip itself. A mark and a weight tell the states apart, not the colour alone."""
    if figures.phase == "dead":
        return Content.styled("✗ the engine process is gone", "bold $text-error")
    now = _ORDER.index(figures.phase) if figures.phase in _ORDER else -1
    pieces: list[Content | str] = []
    for place, name in enumerate(_ORDER):
        if place == now:
            style, mark = ("bold $text-accent", "●") if name != "idle" else ("bold $text-success", "●")
        elif place < now and (figures.turns or name == "load" or figures.phase != "idle"):
            style, mark = "$quiet", "✓"
        else:
            style, mark = "$faint", "○"
        if pieces:
            pieces.append(Content.styled(" ─ " if width >= 39 else " ", "$faint"))
        pieces.append(Content.styled(f"{mark} {name}", style))
    return Content.assemble(*pieces)


def detail(figures: LiveFigures, width: int) -> Content:
    """One line on what goes on: progress while loading or prefilling, times after."""
    if figures.phase == "load":
        share = f" {figures.load_share:.0%}" if figures.load_share is not None else ""
        return Content.styled(f"{figures.load_stage}{share}", "$quiet")
    if figures.phase == "start" or (figures.phase == "idle" and not figures.turns):
        loaded = f"loaded in {figures.model.load_s:.2f} s" if figures.model.load_s else "nothing loaded yet"
        weights = format_bytes(figures.model.weight_bytes) if figures.model.weight_bytes else ""
        return spread(Content.styled(loaded, "$quiet"), Content.styled(weights, "$quiet"), width)
    if figures.phase == "prefill" and figures.prefill_total:
        filled = round(figures.prefill_done / figures.prefill_total * 10)
        text = f"{figures.prefill_done}/{figures.prefill_total} tokens "
        return Content.assemble((text, "$quiet"), ("━" * filled, "$accent"), ("─" * (10 - filled), "$faint"))
    parts = []
    if figures.ttft_s is not None:
        parts.append(f"TTFT {seconds(figures.ttft_s)}")
    if figures.prefill_s is not None and figures.prefill_total:
        parts.append(f"prefill {figures.prefill_total} tok {seconds(figures.prefill_s)}")
    if figures.reused:
        parts.append(f"reused {figures.reused}")
    return Content.styled(" · ".join(parts), "$quiet").truncate(width, ellipsis=True)


def seconds(value: float | None) -> str:
    """A duration with a unit that suits it."""
    if value is None:
        return "–"
    return (
        f"{value:.2f} s" if value >= 0.995 else f"{value * 1e3:.0f} ms" if value >= 0.0995 else f"{value * 1e3:.1f} ms"
    )
