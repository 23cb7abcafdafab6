"""The time of a step, a bar for each part, and its bytes by part in the lines that are left.

Times come from `figures.step_times`, bytes from `figures.step_bytes`; both are (name, value), and every name has a row
in `_LOOKS`.

Guards: tests/tui/test_charts.py and tests/tui/screens/test_decode_screen.py.
"""

from collections.abc import Callable, Sequence

from textual.content import Content

from headrace.app.tui.metrics.figures import Parts, StepTimes
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, bar, first_that_fits, fitting
from headrace.runtime.metrics.units import format_bytes, format_seconds, three_digits

# The names are made elsewhere, and a name that is missing here raises KeyError in `_bars`:
# - parts of bytes, by `figures.step_bytes`. Those of the weights come from `StepCost.weight_parts`: from `part` of
#   `models.network.tensors.Tensor` for headrace's decoder, from `models.mlx_lm.costs` for mlx-lm's classes;
# - parts of times, by `figures.step_times`, which has those of timed steps from `StepParts.named`.
_LOOKS = {  # style of each part's bar, and its name where that is a longer one
    "weights": ("$primary", "model weights"),
    "attention": ("$primary", ""),
    "MLP": ("$secondary", ""),
    "experts used": ("$secondary", ""),
    "head": ("$success", ""),
    "other weights": ("$foreground 60%", ""),
    "KV": ("$accent", "K/V cache"),
    "the rest": ("$warning", "other kernels"),
    "not reading": ("$warning", ""),
    "not timed": ("$foreground 60%", ""),
    "sampling": ("$success", ""),
    "host": ("$error", ""),
    "waiting": ("$foreground 60%", ""),
}
_NAME = 14  # cells of a part's name
_VALUE = 10  # cells of its value
_MIN_BAR = 4  # cells; a shorter bar shows nothing


class StepSection(Section):
    """The parts of a mean step. Without timed steps, the time of the bytes is computed from the bandwidth."""

    TITLE = "where a step's time goes"
    NAME = "step"
    MIN_LINES = 7
    MAX_LINES = 16

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        times = metrics.step_times
        nbytes = metrics.step_bytes
        self.set_subtitle(_source(times, width))
        if not nbytes:
            return [Content.styled("no model yet", "$quiet")]
        if times is None:
            lines = [Content.styled("no time yet", "$faint")]
        else:
            lines = _time_lines(metrics, times, width, height - 1)
        total = format_bytes(sum(value for _, value in nbytes))
        lines.append(Content.assemble((total, "bold"), (" to read and write", "$quiet")).truncate(width))
        room = height - len(lines)
        return [*lines, *_bars(nbytes, lambda value: f"{three_digits(value / 2**20)} MiB", width, room)]


def _time_lines(metrics: LiveMetrics, times: StepTimes, width: int, height: int) -> list[Content]:
    tokens = ""
    if metrics.totals.proposed:
        tokens = f", {three_digits(metrics.figures.tokens)} tokens"
    head = Content.assemble(("mean step ", "$quiet"), (format_seconds(times.total_s), "bold"), (tokens, "$quiet"))
    span = "of all steps"
    if metrics.phase == "decode" and not metrics.answers.is_several:
        span = "of the last second"
    bars = _bars(times.parts, lambda seconds: f"{three_digits(seconds * 1e3)} ms", width, height - 1)
    return [fitting([head, Content.styled(span, "$quiet")], width), *bars]


def _source(times: StepTimes | None, width: int) -> str:
    """Return how the times were found: how many steps were timed, or that they are computed."""
    if times is None:
        return ""
    if not times.timed:
        return first_that_fits(("time of bytes computed, not timed here", "computed, not timed here"), width - 2)
    if times.every > 1:
        return f"1 step in {times.every} timed"
    if times.timed < times.span:
        return f"{times.timed} of {times.span} steps timed"
    return "every step timed"


def _bars(parts: Parts, format_value: Callable[[float], str], width: int, height: int) -> list[Content]:
    """Return a line for each part, the largest first: name, value and bar. Without room for all, the last is a sum.

    parts: names and values, all in one unit.
    format_value: returns a value with its unit.
    width: cells of a line.
    height: lines.
    """
    shown = []
    for name, value in sorted(parts, key=lambda part: -part[1]):
        style, long_name = _LOOKS[name]
        if value > 0:
            shown.append((long_name or name, value, style))
    if height < min(2, len(shown)):  # the sum alone says nothing
        return []
    if len(shown) > height:
        others = shown[height - 1 :]
        shown = [*shown[: height - 1], (f"+ {len(others)} smaller", sum(value for _, value, _ in others), "$quiet")]
    largest = max((value for _, value, _ in shown), default=0.0)
    room = max(0, width - _NAME - _VALUE - 1)
    lines = []
    for name, value, style in shown:
        text = f"{name:<{_NAME}}{format_value(value):>{_VALUE}} "
        drawn = bar(value / largest, room, style) if room >= _MIN_BAR else Content("")
        lines.append(Content.assemble((text[:_NAME], "$quiet"), text[_NAME:], drawn).truncate(width))
    return lines
