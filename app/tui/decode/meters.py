"""The head of the decode view: four meters at fixed places, and a line on the phase and the cause of slow steps.

    speed  42.1 tok/s  ██████▍────   31 % of the 136 this machine can do      a `Meter`
    ● decode  CPU busy: others use 1.2 of 4                                   `state`

Panel, F2 and `top` show it. A meter is a function that returns a `Meter`; `_line` alone decides about its places.
tests/tui/decode/test_meters.py has every width.
"""

from collections.abc import Sequence
from typing import NamedTuple

from textual.content import Content

from headrace.app.answer.sentence import ABOVE_PEAK, cause, sentence
from headrace.app.tui.metrics.facts import ModelFacts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Lines, bar, first_that_fits, fitting, spread
from headrace.runtime.metrics.units import (
    counted,
    format_bytes,
    format_milliseconds,
    format_seconds,
    percent,
    three_digits,
)

_LABELS = {"speed": "speed", "step": "typical step", "cache": "K/V cache", "memory": "memory reads"}
"""Names of the meters, from a width of `_WIDE` on."""
_WIDE = 74  # cells
_LONG_LABEL = 13  # cells, like the next two
_LABEL = 7
_VALUE = 12
_NOTES = ((66, 37), (50, 20), (0, 17))  # cells of the text right of a bar, from a width on
_LEAST_BAR = 4  # cells; a shorter bar shows nothing
_CAN_DO = " this machine can do"
_PHASE = 10  # cells of the phase and its mark
_WORDS_FROM = 50  # cells from which the phase has its word next to a cause
_SMALL = 0.01  # smaller parts of the time to first token are left out


class Meter(NamedTuple):
    """One line of the meters.

    name: at the left, short.
    value: the figure with its unit.
    share: filled part of the bar; None: the line has a text in the place of the bar.
    notes: texts for the whole that `value` is a part of, the longest first.
    text: replaces the bar.
    is_doubtful: other programs distort the figure.
    """

    name: str
    value: str
    share: float | None
    notes: Sequence[str]
    text: Sequence[str] = ()
    is_doubtful: bool = False


class MeterLines(Lines):
    """Speed, step, cache and memory, each with its whole, and one line below. The height never changes."""

    HEIGHT = 5
    _frozen = False

    def show(self, metrics: LiveMetrics, *, frozen: bool = False) -> None:
        self._frozen = frozen
        super().show(metrics)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        meters = [_speed(metrics), _step(metrics), _cache(metrics), _memory(metrics)]
        return [*(_line(meter, width) for meter in meters), self._last_line(metrics, width)][:height]

    def _last_line(self, metrics: LiveMetrics, width: int) -> Content:
        if self._frozen:
            return Content.styled(" ❚❚ frozen, F7 continues ", "reverse bold $text-warning").truncate(width)
        return state(metrics, width)

    def change_key(self, metrics: LiveMetrics) -> object:
        return self._frozen, super().change_key(metrics)


def _line(meter: Meter, width: int) -> Content:
    """Return a meter at places that depend on the width alone."""
    label = f"{meter.name:<{_LABEL}}"
    if width >= _WIDE:
        label = f"{_LABELS[meter.name]:<{_LONG_LABEL}}"
    value_style = "bold"
    bar_style = "$primary"
    if meter.is_doubtful:
        value_style = "$quiet"
        bar_style = "$foreground 40%"
    head = Content.assemble((label, "$quiet"), (f"{meter.value:<{_VALUE}}", value_style))
    if meter.share is None:
        text = first_that_fits(meter.text, width - head.cell_length)
        return Content.assemble(head, (text, "$quiet")).truncate(width)
    room = next(cells for least, cells in _NOTES if width >= least)
    note = first_that_fits(meter.notes, room)[:room]
    cells = width - head.cell_length - room - 2
    if cells < _LEAST_BAR:
        return Content.assemble(head, (note, "$quiet")).truncate(width)
    return Content.assemble(head, bar(meter.share, cells, bar_style), "  ", (note, "$quiet"))


def _percent(share: float) -> str:
    """Return a share in five cells, so that the text after it stays in its place: ` 31 %`."""
    return f"{percent(share):>5}"


def _of_peak(share: float, peak: str) -> tuple[str, str]:
    """Return the texts for a share of the machine's measured peak.

    A peak that was measured while other programs ran is too low, so a share above 100 % is no figure of the machine.
    """
    if share > ABOVE_PEAK:
        return f"above the measured peak of {peak}", f"above {peak}"
    return f"{_percent(share)} of the {peak}{_CAN_DO}", f"{_percent(share)} of {peak}"


def _speed(metrics: LiveMetrics) -> Meter:
    """Return tokens per second now, or of the turn, as a part of the limit of this machine."""
    figures = metrics.figures
    rate = metrics.rate_now
    if rate is None:
        rate = metrics.rate_average
    max_rate = figures.roofline_rate
    value = f"{three_digits(rate)} tok/s"
    if max_rate is None:
        return Meter("speed", value, 0.0, ("limit not measured yet", "limit unknown"))
    limit = three_digits(max_rate)
    if rate is None:
        return Meter("speed", value, 0.0, (f"of the {limit}{_CAN_DO}", f"of {limit}"))
    share = rate / max_rate
    return Meter("speed", value, share, _of_peak(share, limit), is_doubtful=share > ABOVE_PEAK)


def _step(metrics: LiveMetrics) -> Meter:
    """Return the median time of a step, with p95 and p99 in the place of a bar."""
    latencies = metrics.latencies
    if latencies is None:
        return Meter("step", "–", None, (), ("time of a step: after the second one", "after two steps"))
    p95 = format_milliseconds(latencies.p95)
    p99 = format_milliseconds(latencies.p99)
    under = f"│ 95 % of {len(metrics.latency_steps):,} steps under {p95:>4}, 99 % under {p99:>4} ms"
    texts = (
        f"{under} · {metrics.figures.tokens / metrics.figures.sequences:.1f} tokens a step",
        under,
        f"│ 95 % under {p95:>4}, 99 % under {p99:>4} ms",
        f"p95 {p95:>4} p99 {p99:>4}",
        f"p95 {p95:>4}",
    )
    return Meter("step", f"{format_milliseconds(latencies.p50)} ms p50", None, (), texts)


def _cache(metrics: LiveMetrics) -> Meter:
    """Return the K/V bytes: of the conversation and a full context, or reserved by several answers and the room."""
    batch = metrics.answers
    # The tokens of several answers are not those of the cache. After them it has those of the conversation again.
    if batch.is_several and (batch.is_endless or not batch.over):
        used = batch.kv_used_bytes
        room = batch.kv_room_bytes
        if not room:
            return Meter("cache", format_bytes(used), 0.0, ("",))
        if not used:
            return Meter("cache", "empty", 0.0, (f"room for {format_bytes(room)}",))
        return Meter("cache", format_bytes(used), used / room, (f"{_percent(used / room)} of {format_bytes(room)}",))
    used = metrics.fill.used_bytes
    whole = metrics.model.kv_bytes_at_limit
    tokens = f"{metrics.fill.tokens:,} of {metrics.model.context_limit:,} tokens"
    short = f"{metrics.fill.tokens:,} tok"
    if not whole:
        return Meter("cache", format_bytes(used), 0.0, (short,))
    share = _percent(used / whole)
    filled = f"{share} of {format_bytes(whole)}"
    return Meter("cache", format_bytes(used), used / whole, (f"{filled}: {tokens}", f"{filled} · {short}", filled))


def _memory(metrics: LiveMetrics) -> Meter:
    """Return the achieved bandwidth and MBU. Where other programs slow the steps down, both are doubtful."""
    achieved = metrics.achieved_gb_s
    memory = metrics.memory
    share = metrics.mbu
    if share is None:
        share = memory.share
    base = memory.base_gb_s
    if share and achieved is not None:
        base = achieved / share
    value = f"{three_digits(achieved)} GB/s"
    if base is None:
        return Meter("memory", value, 0.0, ("bandwidth not measured yet", "not measured yet"))
    limit = three_digits(base)
    if share is None:
        return Meter("memory", value, 0.0, (f"of the {limit}{_CAN_DO}", f"of {limit}"))
    if share > ABOVE_PEAK:
        return Meter("memory", value, share, _of_peak(share, limit), is_doubtful=True)
    if metrics.busy:
        part = _percent(share)
        busy = (f"{part} of {limit} (busy: other programs)", f"{part} of {limit} (busy)", f"{part} (busy)")
        return Meter("memory", value, share, busy, is_doubtful=True)
    return Meter("memory", value, share, _of_peak(share, limit))


def state(metrics: LiveMetrics, width: int) -> Content:
    """Return a line on the phase and its detail. Marks tell phases apart, not colour alone."""
    if metrics.phase == "dead":
        return Content.styled("✗ the engine process is gone; F8 starts another", "bold $text-error").truncate(width)
    if metrics.phase == "failed":
        text = "✗ no model is loaded; F8 tries again"
        return Content.styled(text, "bold $text-error").truncate(width)
    mark = "◌"
    style = "bold $text-accent"
    if metrics.phase in ("idle", "start"):
        mark = "●"
        style = "bold $text-success"
    details = [Content.styled(text, "$quiet") for text in _details(metrics)]
    if details and width < _WORDS_FROM:
        return Content.assemble((mark, style), " ", details[0]).truncate(width, ellipsis=True)
    phase = f"{mark} {metrics.phase}"
    if details:  # they start in the same column in every phase
        phase = phase.ljust(_PHASE)
    line = fitting([Content.styled(phase, style), *details], width)
    first = metrics.first_token
    if first is None or metrics.answers.is_several:
        return line
    return spread(line, Content.styled(f"first token {format_seconds(first.ttft_s)}", "$quiet"), width)


def _details(metrics: LiveMetrics) -> list[str]:
    """Return texts on the phase, the most important first."""
    if metrics.phase == "load":
        return [f"{metrics.load_stage} {percent(metrics.load_share)}".rstrip()]
    batch = metrics.answers
    if metrics.phase == "start" or (metrics.phase == "idle" and not metrics.turns and not batch.is_several):
        return _load_details(metrics.model)
    if metrics.phase == "prefill" and metrics.answer.prefill_total:
        return [f"{metrics.answer.prefill_done:,} of {metrics.answer.prefill_total:,} prompt tokens"]
    texts = []
    if batch.is_several:
        if batch.growing:
            texts.append(f"{batch.growing} of {len(batch.rows)} running")
        else:
            texts.append(counted(len(batch.rows), "answer"))
        if batch.rate_each is not None:
            texts.append(f"{three_digits(batch.rate_each)} tok/s each")
        texts.append(f"{batch.tokens:,} tokens")
    if reason := cause(metrics.figures):
        texts.append(reason)
    return texts


def _load_details(model: ModelFacts) -> list[str]:
    """Return texts on a model that has not answered yet."""
    texts = ["nothing loaded yet"]
    if model.load_s:
        texts = [f"loaded in {model.load_s:.2f} s"]
    if model.weight_bytes:
        texts.append(f"a step reads {format_bytes(model.weight_bytes)} of weights")
    return texts


def whole_why(metrics: LiveMetrics) -> str:
    """Return the sentences on the current steps, and the time to first token with its parts."""
    steps = sentence(metrics.figures)
    first = metrics.first_token
    if first is None:
        return steps
    reasons = []
    if metrics.answer.reused:
        reasons.append(f"{metrics.answer.reused:,} prompt tokens cached")
    if metrics.answer.prefill_total:
        reasons.append(f"{metrics.answer.prefill_total:,} computed")
    for name, seconds in first.parts():
        if seconds >= _SMALL * first.ttft_s:
            reasons.append(f"{name} {format_seconds(seconds)}")
    return f"{steps} First token after {format_seconds(first.ttft_s)}: {', '.join(reasons)}."
