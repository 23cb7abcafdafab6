"""Map of the K/V block pool: shared, used, cached and free blocks."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, spread
from headrace.runtime.metrics.telemetry import PoolStats
from headrace.runtime.metrics.units import format_bytes

_KINDS = (
    ("▓", "shared", "$accent"),
    ("█", "used", "$primary"),
    ("▒", "cached", "$foreground 60%"),
    ("·", "free", "$quiet"),
)
_LEGEND = 3  # lines below the map


class PoolSection(Section):
    """Blocks of 128 tokens over all layer groups; a cell is a block, or several if they do not fit."""

    TITLE = "K/V pool, blocks"

    def change_key(self, metrics: LiveMetrics) -> object:
        batch = metrics.batch
        return batch and (id(batch), batch.blocks, batch.pool_bytes, batch.kv_used_bytes)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        batch = metrics.batch
        if batch is None:
            return []
        room = f"{format_bytes(batch.kv_used_bytes)} reserved of {format_bytes(batch.kv_room_bytes)}"
        if batch.blocks is None:
            return [
                Content.styled("one cache per sequence: no pool", "$faint"),
                Content.styled(room, "$quiet").truncate(width),
            ]
        counts = parts(batch.blocks)
        named = [
            Content.assemble((f"{mark} ", style), (f"{name} ", "$quiet"), (f"{count:,}", "bold"))
            for (mark, name, style), count in zip(_KINDS, counts, strict=True)
        ]
        held = Content.styled(f"{format_bytes(batch.pool_bytes)} in blocks", "$quiet")
        legend = [spread(named[0], named[1], width), spread(named[2], named[3], width)]
        legend.append(spread(held, Content.styled(room, "$quiet"), width))
        return [*pool_map(counts, width, max(1, height - _LEGEND)), *legend]


def parts(blocks: PoolStats) -> tuple[int, int, int, int]:
    """Return the counts of shared, used, cached and free blocks."""
    return blocks.shared, blocks.used - blocks.shared, blocks.cached, blocks.free


def pool_map(counts: Sequence[int], width: int, height: int) -> list[Content]:
    """Return at most `height` lines; each kind that exists gets a cell, if there are enough."""
    total = sum(counts)
    cells = min(total, width * height)
    ends, so_far = [0], 0
    for count in counts:
        so_far += count
        end = round(so_far / total * cells) if total else 0
        ends.append(min(cells, max(end, ends[-1] + 1)) if count else ends[-1])
    pieces = [
        (mark * (end - start), style) for (mark, _, style), start, end in zip(_KINDS, ends, ends[1:], strict=False)
    ]
    whole = Content.assemble(*pieces)
    return [whole[start : start + width] for start in range(0, cells, width)]
