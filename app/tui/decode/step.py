"""The step taken apart: its milliseconds and its bytes by part, a bar each."""

from collections.abc import Callable, Sequence

from textual.content import Content

from headrace.app.answer.phrases import mbu_text
from headrace.app.tui.metrics.figures import Parts, StepTimes
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, legend, segments, spread
from headrace.runtime.metrics.units import format_bytes, format_seconds, three_digits

_LOOKS = {  # character and style of each part; the K/V look alike in both bars
    "weights": ("█", "$primary"),
    "attention": ("█", "$primary"),
    "MLP": ("▓", "$secondary"),
    "experts used": ("▓", "$secondary"),
    "head": ("▒", "$success"),
    "other weights": ("░", "$foreground 60%"),
    "KV": ("▞", "$accent"),
    "the rest": ("▒", "$warning"),
    "not reading": ("▒", "$warning"),
    "not timed": ("░", "$foreground 60%"),
    "sampling": ("░", "$success"),
    "host": ("▚", "$error"),
    "waiting": ("·", "$foreground 60%"),
}


class StepSection(Section):
    """Two bars with their legends. Without timed steps, the time of the bytes is computed from the bandwidth."""

    TITLE = "one step, taken apart"
    NAME = "step"
    LEAST = 8
    MOST = 11

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        times = metrics.step_times
        nbytes = metrics.step_bytes
        self.set_subtitle(_source(times))
        if not nbytes:
            return [Content.styled("no model yet", "$quiet")]
        each = max(1, (height - 4) // 2)  # lines of a legend
        if times is None:
            lines = [Content.styled("no time yet", "$faint")]
        else:
            share = metrics.mbu
            busy = metrics.busy
            tokens = metrics.figures.tokens
            many = f", {three_digits(tokens)} tokens" if metrics.totals.proposed else ""
            head = Content.assemble((format_seconds(times.total_s), "bold"), (f" a step{many}", "$quiet"))
            used = Content.assemble(("MBU ", "$quiet"), (mbu_text(share, busy=busy), "bold $text-primary"))
            said = used.append(Content.styled(" of the bandwidth", "$quiet")) if share is not None else used
            fits = head.cell_length + said.cell_length < width
            lines = [spread(head, said if fits else used, width), _bar(times.parts, width)]
            lines += _legend(
                times.parts, lambda seconds: three_digits(seconds * 1e3), "ms", width, max(1, height - 4 - each)
            )
        total = Content.assemble((format_bytes(sum(value for _, value in nbytes)), "bold"), (" a step", "$quiet"))
        achieved = metrics.achieved_gb_s
        speed = Content.styled(f"{three_digits(achieved)} GB/s achieved" if achieved else "", "$quiet")
        lines += [spread(total, speed, width), _bar(nbytes, width)]
        return [*lines, *_legend(nbytes, lambda value: three_digits(value / 2**20), "MiB", width, each)]


def _source(times: StepTimes | None) -> str:
    if times is None:
        return ""
    if not times.timed:
        return "time of bytes computed, not timed here"
    if times.every > 1:
        return f"1 step in {times.every} timed"
    return "every step timed" if times.timed >= times.span else f"{times.timed} of {times.span} steps timed"


def _bar(parts: Parts, width: int) -> Content:
    return segments([(value, *_LOOKS[name]) for name, value in parts], width)


def _legend(parts: Parts, format_value: Callable[[float], str], unit: str, width: int, most: int) -> list[Content]:
    """Return the parts above zero with their values, the largest first; parts beyond `most` lines are summed."""
    ordered = sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
    pieces = []
    for place, (name, value) in enumerate(ordered):
        text = f"{format_value(value)} {unit}" if place == 0 else format_value(value)
        pieces.append(Content.assemble(_LOOKS[name], (f" {name} ", "$quiet"), (text, "bold")))

    def rest(count: int) -> Content:
        total = sum(value for _, value in ordered[count:])
        return Content.assemble((f"+ {len(ordered) - count} more ", "$quiet"), (format_value(total), "bold"))

    return legend(pieces, rest, width, most)
