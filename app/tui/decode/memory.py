"""MLX's memory against the machine's."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.decode.figures import LiveFigures
from headrace.app.tui.decode.section import Section, bar, spread
from headrace.runtime.units import format_bytes


class MemorySection(Section):
    """Active and peak, as the allocator reports them, and what the machine has."""

    TITLE = "memory (MLX)"

    def lines(self, figures: LiveFigures, width: int, height: int) -> Sequence[Content]:
        last, total = figures.last, figures.machine.memory_bytes
        active = last.active_memory_bytes if last else 0
        peak = last.peak_memory_bytes if last else 0
        left = Content.assemble((format_bytes(active), "bold"), (" active", "$quiet"))
        right = Content.assemble((format_bytes(peak), "bold"), (" peak", "$quiet"))
        machine = Content.styled(f"of {format_bytes(total)} in the machine" if total else "", "$quiet")
        share = active / total if total else 0.0
        lines = [spread(left, right, width), bar(share, width, "$success")]
        lines.append(spread(machine, Content.styled(f"{share:.1%}" if total else "", "$quiet"), width))
        if height > 3 and figures.machine.name:
            lines.append(
                Content.styled(f"{figures.machine.name} · {figures.machine.backend}", "$quiet").truncate(
                    width, ellipsis=True
                )
            )
        if height > 4 and figures.model.kernels:
            lines.append(Content.styled(f"kernels {figures.model.kernels}", "$quiet").truncate(width, ellipsis=True))
        return lines
