"""Machine load: CPU, GPU, memory, swap, power, temperature, and other programs."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from textual.content import Content

from headrace.app.answer.sentence import cpu_phrase
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, bar, folded
from headrace.runtime.metrics.telemetry import RankTimes
from headrace.runtime.metrics.units import format_bytes, format_joules, percent, three_digits

if TYPE_CHECKING:  # the chat's first frame does not import it
    from headrace.runtime.machine.load import Load

_LABEL = 5
_TIMED_WITHIN = 64  # steps in which one that was timed by rank is looked for


class MachineSection(Section):
    """As many lines as fit, the most important first."""

    TITLE = "machine"
    NAME = "machine"
    LEAST = 4
    MOST = 10

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
        each = metrics.energy.joules_per_token
        lines = _measured(metrics.load, each, width) if metrics.load is not None else []
        machine = metrics.machine
        busy = metrics.contention
        contention = [Content.styled(contention_text(busy, width), "bold $text-warning")] if busy else []
        about = [
            _bandwidth(metrics),
            _allocated(metrics),
            Content.styled(f"{machine.name} · {machine.backend}" if machine.name else "", "$quiet"),
            Content.styled(f"kernels {metrics.model.kernels}" if metrics.model.kernels else "", "$quiet"),
        ]
        shown = [line for line in [*contention, *_ranks(metrics), *lines, *about] if line.plain]
        return [part for line in shown for part in folded(line, width)] or [Content.styled("–", "$faint")]


def contention_text(load: "Load", width: int = 120) -> str:
    """Return "CPU busy" with the cores that other programs use, shortened to fit a width."""
    full = f"CPU busy: {cpu_phrase(load)}"
    forms = (full, full.partition(" (")[0], f"CPU busy: others use {load.other_cpus:.1f} of {load.cpus}")
    return next((form for form in forms if len(form) <= width), forms[-1])


def _measured(load: "Load", joules_per_token: float | None, width: int) -> list[Content]:
    readings = load.readings
    used = load.memory_used
    cpus = f" {load.own_cpus:.1f} + {load.other_cpus:.1f} others of {load.cpus}"
    lines = [_two("CPU", load.own_cpus / load.cpus, load.other_cpus / load.cpus, cpus, width)]
    if readings.gpu_share is not None:
        gpu_memory = readings.gpu_memory_used
        total = f" of {format_bytes(readings.gpu_memory_total)}" if readings.gpu_memory_total else ""
        memory = f", {format_bytes(gpu_memory)}{total}" if gpu_memory is not None else ""
        lines.append(_two("GPU", readings.gpu_share, 0.0, f" {percent(readings.gpu_share)}{memory}", width))
    total = f" {format_bytes(used)} of {format_bytes(load.memory_total)}"
    lines.append(_two("RAM", used / load.memory_total if load.memory_total else 0.0, 0.0, total, width))
    facts = [f"swap {format_bytes(load.swap_used)}"]
    if readings.power_w is not None:
        facts.append(f"{readings.power_w:.1f} W")
    if joules_per_token is not None:
        facts.append(f"{format_joules(joules_per_token)}/token")
    if readings.temperature_c is not None:
        facts.append(f"{readings.temperature_c:.0f} °C")
    return [*lines, Content.styled(" · ".join(facts), "bold $text-warning" if load.swap_used > _SWAPPING else "$quiet")]


_SWAPPING = 1 << 30  # bytes in swap from which they are worth a second look


def _two(label: str, share: float, others: float, text: str, width: int) -> Content:
    """`CPU  ███▒▒──── 1.0 + 0.5 others of 2`: █ ours, ▒ of others."""
    room = max(0, width - _LABEL - len(text))
    both = bar(min(1.0, share + others), room, "$primary")
    ours = min(room, round(share * room))
    theirs = min(room, round((share + others) * room)) - ours
    if others > 0 and theirs > 0:
        rest = room - ours - theirs
        both = Content.assemble(("█" * ours, "$primary"), ("▒" * theirs, "$warning"), ("─" * rest, "$foreground 20%"))
    return Content.assemble((f"{label:<{_LABEL}}", "$quiet"), both, text)


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
    for number, rank in enumerate(metrics.model.ranks):
        name, _, part = rank.partition(": ")
        times = _rank_times(metrics)[number : number + 1]
        spent = [f"{rank_times.compute_s * 1e3:.1f} + {rank_times.wait_s * 1e3:.1f} waiting + " for rank_times in times]
        rest = [f"{rank_times.collective_s * 1e3:.1f} ms · " for rank_times in times]
        lines.append(Content.assemble((f"{name} ", "$quiet"), *spent, *rest, (part, "$quiet")))
    return lines


def _rank_times(metrics: LiveMetrics) -> tuple[RankTimes, ...]:
    newest = islice(reversed(metrics.answer.records), _TIMED_WITHIN)
    return next((step.ranks for step in newest if step.ranks), ())


def _bandwidth(metrics: LiveMetrics) -> Content:
    """Return the memory bandwidth: measured, now, nominal."""
    machine = metrics.machine
    if machine.measured_gb_s is None:
        return Content("")
    now = f", now {three_digits(machine.memory_gb_s)}" if machine.memory_gb_s else ""
    nominal = f", nominal {three_digits(machine.nominal_gb_s)}" if machine.nominal_gb_s else ""
    return Content.assemble(
        ("this machine: ", "$quiet"), (f"{three_digits(machine.measured_gb_s)} GB/s", "bold"),
        (f"{now}{nominal}", "$quiet"),
    )  # fmt: skip
