"""The head of the decode view: speed, phase and time to first token, and the sentence on the current steps."""

import textwrap
from collections.abc import Sequence
from math import ceil

from textual.content import Content

from headrace.app.answer.sentence import sentence
from headrace.app.tui.metrics.facts import FirstToken
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Lines, fitting
from headrace.runtime.metrics.units import format_bytes, format_seconds, three_digits

_USUAL = 145  # characters of a sentence
_SMALL = 0.01  # smaller parts of the time to first token are left out


class SentenceLines(Lines):
    """A line on the phase, then the sentence, wrapped; the height grows with it and shrinks with the width alone."""

    _frozen = False
    _wrapped = 0  # width that the height is for

    def on_resize(self) -> None:
        width = self.content_size.width
        if width != self._wrapped and width > 0:
            self._wrapped = width
            self.styles.height = 1 + ceil(_USUAL / width) + self.gutter.height
        super().on_resize()

    def show(self, metrics: LiveMetrics, *, frozen: bool = False) -> None:
        self._frozen = frozen
        super().show(metrics)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        mark = " ❚❚ frozen, F7 continues " if self._frozen else ""
        words = textwrap.wrap(sentence(metrics.figures), width, initial_indent=mark + " " * self._frozen)
        lines = [state(metrics, width), *(Content.styled(line, "bold") for line in words)]
        if mark:
            lines[1] = lines[1].stylize("reverse $text-warning", 0, len(mark))
        if len(lines) > height:
            self.styles.height = len(lines) + self.gutter.height
        return lines

    def change_key(self, metrics: LiveMetrics) -> object:
        return self._frozen, super().change_key(metrics)


def state(metrics: LiveMetrics, width: int) -> Content:
    """Return a line on the speed, the phase and its detail. Marks tell phases apart, not colour alone."""
    if metrics.phase == "dead":
        return Content.styled("✗ the engine process is gone; F8 starts another", "bold $text-error").truncate(width)
    if metrics.phase == "failed":
        return Content.styled("✗ no model is loaded; F8 tries again, F5 picks a model", "bold $text-error").truncate(
            width
        )
    rate = metrics.rate_average if metrics.rate_now is None else metrics.rate_now
    speed = Content.assemble((three_digits(rate), "bold $text-primary"), (" tok/s", "bold"))
    mark, style = ("●", "$text-success") if metrics.phase in ("idle", "start") else ("◌", "$text-accent")
    phase = Content.styled(f"{mark} {metrics.phase}", f"bold {style}")
    pieces = [speed, phase] if rate is not None else [phase]
    return fitting([*pieces, *(Content.styled(text, "$quiet") for text in _details(metrics))], width)


def _details(metrics: LiveMetrics) -> list[str]:
    """Return texts on the phase, the most important first."""
    model = metrics.model
    if metrics.phase == "load":
        share = f" {metrics.load_share:.0%}" if metrics.load_share is not None else ""
        return [f"{metrics.load_stage}{share}"]
    if metrics.phase == "start" or (metrics.phase == "idle" and not metrics.turns and metrics.batch is None):
        loaded = f"loaded in {model.load_s:.2f} s" if model.load_s else "nothing loaded yet"
        return [loaded, format_bytes(model.weight_bytes)] if model.weight_bytes else [loaded]
    if (batch := metrics.batch) is not None:
        running = f"{batch.growing} of {len(batch.rows)} running" if batch.growing else f"{len(batch.rows)} answers"
        each = [f"{three_digits(batch.rate_each)} tok/s each"] if batch.rate_each is not None else []
        return [running, *each, f"{batch.tokens:,} tokens"]
    if metrics.phase == "prefill" and metrics.prefill_total:
        return [f"{metrics.prefill_done:,} of {metrics.prefill_total:,} prompt tokens"]
    return [] if metrics.first_token is None else _first_token(metrics.first_token, metrics)


def _first_token(first: FirstToken, metrics: LiveMetrics) -> list[str]:
    """Return the time to first token, the prompt's tokens, and the time's longest parts."""
    cached = f"{metrics.reused:,} prompt tokens cached" if metrics.reused else ""
    computed = f"{metrics.prefill_total:,} computed" if metrics.prefill_total else ""
    parts = [f"{name} {format_seconds(seconds)}" for name, seconds in first.parts() if seconds >= _SMALL * first.ttft_s]
    return [text for text in (f"first token {format_seconds(first.ttft_s)}", cached, computed, *parts) if text]
