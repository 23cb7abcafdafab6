"""Machine load: CPU, GPU, memory, swap, power, temperature, and other programs.

The load is a sample of `MachineWatch`, every two seconds; a fact that the machine does not report has no line.

Guard: tests/tui/decode/test_machine.py.
"""

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from textual.content import Content

from headrace.app.answer.sentence import cpu_phrase
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, bar, first_that_fits, folded
from headrace.runtime.metrics.telemetry import RankTimes
from headrace.runtime.metrics.units import format_bytes, format_joules, percent, three_digits

if TYPE_CHECKING:  # the chat's first frame does not import it
    from headrace.runtime.machine.machine_load import MachineLoad

_LABEL = 5  # cells of `CPU`, `GPU` and `RAM`, with the gap
_TIMED_WITHIN = 64  # steps in which one that was timed by rank is looked for


class MachineSection(Section):
    """As many lines as fit, the most important first."""

    TITLE = "machine"
    NAME = "machine"
    MIN_LINES = 4
    MAX_LINES = 10

    def applies(self, metrics: LiveMetrics) -> bool:
        return metrics.has_steps or metrics.answers.is_several

    def change_key(self, metrics: LiveMetrics) -> object:
        last = metrics.last
        memory = (last.active_memory_bytes >> 20, last.peak_memory_bytes >> 20) if last else None
        return (
            id(metrics),
            metrics.load,
            metrics.contention,
            memory,
            metrics.machine,
            metrics.model.kernels,
            metrics.model.ranks,
            _rank_times(metrics),
        )

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        lines = []
        if metrics.contention:
            lines.append(Content.styled(contention_text(metrics.contention, width), "bold $text-warning"))
        lines += _ranks(metrics)
        if metrics.load is not None:
            lines += _measured(metrics.load, metrics.energy.joules_per_token, width)
        lines += [_bandwidth(metrics), _allocated(metrics)]
        if metrics.machine.name:
            lines.append(Content.styled(f"{metrics.machine.name} · {metrics.machine.backend}", "$quiet"))
        if metrics.model.kernels:
            lines.append(Content.styled(f"kernels {metrics.model.kernels}", "$quiet"))
        shown = [part for line in lines if line.plain for part in folded(line, width)]
        return shown or [Content.styled("–", "$faint")]


def contention_text(load: "MachineLoad", width: int = 120) -> str:
    """Return "CPU busy" with the cores that other programs use, shortened to fit a width."""
    full = f"CPU busy: {cpu_phrase(load)}"
    forms = (full, full.partition(" (")[0], f"CPU busy: others use {load.other_cpus:.1f} of {load.cpus}")
    return first_that_fits(forms, width)


def _measured(load: "MachineLoad", joules_per_token: float | None, width: int) -> list[Content]:
    """Return the lines of a sample: bars of CPU, GPU and memory, then swap, power and temperature."""
    readings = load.readings
    cpus = f"{load.own_cpus:.1f} + {load.other_cpus:.1f} others of {load.cpus}"
    lines = [_bar_line("CPU", load.own_cpus / load.cpus, cpus, width, others=load.other_cpus / load.cpus)]
    if readings.gpu_share is not None:
        text = percent(readings.gpu_share)
        if readings.gpu_memory_used is not None:
            text += f", {format_bytes(readings.gpu_memory_used)}"
            if readings.gpu_memory_total:
                text += f" of {format_bytes(readings.gpu_memory_total)}"
        lines.append(_bar_line("GPU", readings.gpu_share, text, width))
    memory = f"{format_bytes(load.memory_used)} of {format_bytes(load.memory_total)}"
    lines.append(_bar_line("RAM", load.memory_used / max(1, load.memory_total), memory, width))
    facts = [f"swap {format_bytes(load.swap_used)}"]
    if readings.power_w is not None:
        facts.append(f"{readings.power_w:.1f} W")
    if joules_per_token is not None:
        facts.append(f"{format_joules(joules_per_token)}/token")
    if readings.temperature_c is not None:
        facts.append(f"{readings.temperature_c:.0f} °C")
    style = "bold $text-warning" if load.swap_used > _SWAPPING else "$quiet"
    lines.append(Content.styled(" · ".join(facts), style))
    return lines


_SWAPPING = 1 << 30  # bytes in swap from which they are worth a second look


def _bar_line(label: str, share: float, text: str, width: int, *, others: float = 0.0) -> Content:
    """Return `CPU  ███▒▒──── 1.0 + 0.5 others of 2`: █ ours, ▒ of others.

    label: at most `_LABEL` cells.
    share: our part of the machine, 0 to 1.
    text: right of the bar.
    width: cells of the line.
    others: part of other programs, 0 to 1.
    """
    room = max(0, width - _LABEL - len(text) - 1)
    num_ours = min(room, round(share * room))
    num_theirs = min(room, round((share + others) * room)) - num_ours
    if num_theirs > 0 and others > 0:
        drawn = Content.assemble(
            ("█" * num_ours, "$primary"),
            ("▒" * num_theirs, "$warning"),
            ("─" * (room - num_ours - num_theirs), "$foreground 20%"),
        )
    else:  # in eighths of a cell
        drawn = bar(share + others, room, "$primary")
    return Content.assemble((f"{label:<{_LABEL}}", "$quiet"), drawn, " ", text)


def _allocated(metrics: LiveMetrics) -> Content:
    """Return the memory that MLX's allocator holds."""
    last = metrics.last
    if last is None:
        return Content("")
    return Content.assemble(
        ("model memory ", "$quiet"), (format_bytes(last.active_memory_bytes), "bold"),
        (f" (peak {format_bytes(last.peak_memory_bytes)})", "$quiet"),
    )  # fmt: skip


def _ranks(metrics: LiveMetrics) -> list[Content]:
    """Return a line per rank: its times in the newest timed step, then its part and link."""
    lines = []
    for rank, times in zip_longest(metrics.model.ranks, _rank_times(metrics)[: len(metrics.model.ranks)]):
        name, _, part = rank.partition(": ")
        text = ""
        if times is not None:
            milliseconds = [f"{s * 1e3:.1f}" for s in (times.compute_s, times.wait_s, times.collective_s)]
            text = "{} + {} waiting + {} ms · ".format(*milliseconds)
        lines.append(Content.assemble((f"{name} ", "$quiet"), text, (part, "$quiet")))
    return lines


def _rank_times(metrics: LiveMetrics) -> tuple[RankTimes, ...]:
    """Return the ranks' times of the newest timed step; () without one."""
    newest = islice(reversed(metrics.answer.records), _TIMED_WITHIN)
    return next((step.ranks for step in newest if step.ranks), ())  # one step in several is timed


def _bandwidth(metrics: LiveMetrics) -> Content:
    """Return the memory bandwidth: measured, now, nominal."""
    machine = metrics.machine
    if machine.measured_gb_s is None:
        return Content("")
    others = ""
    if machine.memory_gb_s:
        others += f", now {three_digits(machine.memory_gb_s)}"
    if machine.nominal_gb_s:
        others += f", nominal {three_digits(machine.nominal_gb_s)}"
    return Content.assemble(
        ("this machine: ", "$quiet"), (f"{three_digits(machine.measured_gb_s)} GB/s", "bold"), (others, "$quiet")
    )  # fmt: skip
