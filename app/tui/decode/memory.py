"""MLX's memory against the machine's."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.decode.section import Section, bar, spread
from headrace.runtime.units import format_bytes


class MemorySection(Section):
    """Active and peak, as the allocator reports them, and what the machine has."""

    TITLE = "memory (MLX)"

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        last, total = metrics.last, metrics.machine.memory_bytes
        active = last.active_memory_bytes if last else 0
        peak = last.peak_memory_bytes if last else 0
        left = Content.assemble((format_bytes(active), "bold"), (" active", "$quiet"))
        right = Content.assemble((format_bytes(peak), "bold"), (" peak", "$quiet"))
        machine = Content.styled(f"of {format_bytes(total)} in the machine" if total else "", "$quiet")
        share = active / total if total else 0.0
        lines = [spread(left, right, width), bar(share, width, "$success")]
        lines.append(spread(machine, Content.styled(f"{share:.1%}" if total else "", "$quiet"), width))
        if height > 3 and metrics.machine.name:
            lines.append(
                Content.styled(f"{metrics.machine.name} · {metrics.machine.backend}", "$quiet").truncate(
                    width, ellipsis=True
                )
            )
        if height > 4 and metrics.model.kernels:
            lines.append(Content.styled(f"kernels {metrics.model.kernels}", "$quiet").truncate(width, ellipsis=True))
        return lines
