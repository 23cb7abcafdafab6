"""The decode view's layout: sections in columns, and the panel beside the chat.

Sections that have something to show and fit are shown, the most important first; the growing ones share the lines that
are left. The panel takes the requested width if the chat keeps enough columns, less if not, and is hidden below its
least width. In a wide window it also takes the columns that the chat's text leaves. The requested width is kept for a
larger window. The first window size decides whether the panel opens.

A new section is a class in `SECTIONS` (its importance) and `NUMBERED` (its digit). `plan` and `heights` are pure;
tests/tui/test_narrow.py has windows of any size.
"""

from collections.abc import Sequence
from typing import NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import Layout, WidgetPlacement
from textual.widget import Widget

from headrace.app.config.settings import ScreenSettings
from headrace.app.tui.decode.context import ContextSection
from headrace.app.tui.decode.context_speed import ContextSpeedSection
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.machine import MachineSection
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.roofline import RooflineSection
from headrace.app.tui.decode.step import StepSection
from headrace.app.tui.decode.tables import SequencesSection, TurnsSection
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import LONGEST_LINE, Section

SECTIONS: tuple[type[Section], ...] = (
    SequencesSection,
    StepSection,
    LatencySection,
    ContextSection,
    RooflineSection,
    MachineSection,
    ContextSpeedSection,
    TurnsSection,
)
"""The most important first."""
NUMBERED: tuple[type[Section], ...] = (
    LatencySection,
    StepSection,
    ContextSection,
    RooflineSection,
    ContextSpeedSection,
    TurnsSection,
    MachineSection,
)
"""Sections that a digit shows or hides, in the order of the digits."""
SPARE = tuple(kind.NAME for kind in NUMBERED[3:])
"""Sections on demand: they show where the others have their usual lines, with a digit, and with the Tab key of F2."""
MORE = (TurnsSection.NAME, ContextSpeedSection.NAME, MachineSection.NAME)
"""Sections that the Tab key puts first."""
_BEFORE = "An answer shows here, step by step: where its time goes, the latency of each step, the K/V cache."
_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_TWO_FROM = 76  # cells from which there are two columns
_THREE_FROM = 170  # cells from which there are three
_USUAL = 13  # lines of a chart with its frame; a section that can grow beyond leaves the others room first
_LEFT = 0.46  # part of two columns that is not for charts, which gain more by width
_LEAST = 30  # columns of the panel
_MOST = 90  # columns of the panel
_WIDER = 20  # columns that the wide panel has more than the narrow one
_OPEN_FROM = 112  # columns of the window from which it opens by itself
_CHAT = 60  # columns of the window that are never taken from the chat
_WHOLE_CHAT = LONGEST_LINE + 5  # columns of the chat, with those beside its text
ROOM_FROM = _LEAST + _CHAT
"""Columns of the window from which there is room for both."""


def section_bindings(*, priority: bool = False) -> list[BindingType]:
    """Return the digits' bindings, for a screen with an `action_section`."""
    return [
        Binding(
            str(number),
            f"section({number})",
            "Show or hide a section",
            key_display=f"1 to {len(NUMBERED)}",
            show=False,
            priority=priority,
        )
        for number in range(1, len(NUMBERED) + 1)
    ]


def numbered_title(section: Section) -> str:
    """Return the title of a section after the digit that shows or hides it."""
    for number, kind in enumerate(NUMBERED, start=1):
        if kind.NAME == section.NAME:
            return f"{_DIGITS[number]} {section.TITLE}"
    return section.TITLE


class Wanted(NamedTuple):
    """A section to place.

    name: its id.
    min_lines: with the frame.
    usual_lines: leave room for others.
    max_lines: beyond them there is nothing to add.
    is_chart: it gains by width.
    is_spare: it is shown only where the others have their usual lines.
    """

    name: str
    min_lines: int
    usual_lines: int
    max_lines: int
    is_chart: bool
    is_spare: bool


def plan(wanted: Sequence[Wanted], size: Size) -> dict[str, Region]:
    """Return the place of each section that fits, the first ones first.

    Charts stand right of the others, and so do sections for which the left column has no room. In one column all
    stand in their order.
    """
    if size.width < _TWO_FROM:
        count = 1
    elif size.width < _THREE_FROM:
        count = 2
    else:
        count = 3
    # The sections of each column: one after the other goes where it has room for its least lines.
    columns: list[list[Wanted]] = [[] for _ in range(count)]
    rooms = [size.height] * count  # lines left, if each section there has its least
    spare = [size.height] * count  # the same with their usual lines; below 0 some have fewer
    for section in wanted:
        index = 0
        if section.is_chart or section.min_lines > rooms[0]:
            index = max(range(1, count), key=lambda index: rooms[index], default=0)
        if section.min_lines > rooms[index] or (section.is_spare and section.usual_lines > spare[index]):
            continue
        columns[index].append(section)
        rooms[index] -= section.min_lines
        spare[index] -= section.usual_lines

    # Their places: columns side by side, sections one below the other.
    ends = [round(index * size.width / count) for index in range(count + 1)]
    if count == 2:
        ends[1] = round(size.width * _LEFT)
    placed = {}
    for column, start, end in zip(columns, ends, ends[1:], strict=False):
        y = 0
        for section, height in zip(column, heights(column, size.height), strict=True):
            placed[section.name] = Region(start, y, end - start, height)
            y += height
    return placed


def heights(sections: Sequence[Wanted], height: int) -> list[int]:
    """Return the lines of each section: its least ones, and an equal part of the others up to its most.

    The last one takes lines that none wants.
    """
    rows = [section.min_lines for section in sections]
    while (room := height - sum(rows)) > 0:
        growing = [index for index, section in enumerate(sections) if rows[index] < section.max_lines]
        if not growing:
            break
        # Equal parts are rounded down, to one line at least: the loop goes round for what is left over.
        for index in growing:
            more = min(max(1, room // len(growing)), sections[index].max_lines - rows[index])
            rows[index] += min(more, height - sum(rows))
    if rows:
        rows[-1] += height - sum(rows)
    return rows


class _PlannedLayout(Layout):
    """Regions that the container has planned."""

    name = "planned"

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> list[WidgetPlacement]:  # noqa: ARG002
        parent.pre_layout(self)
        assert isinstance(parent, Sections)
        return [
            WidgetPlacement(parent.regions[child.id or ""], NULL_OFFSET, NULL_SPACING, child)
            for child in children
            if child.id in parent.regions
        ]


class Sections(Widget, can_focus=False):
    """`show` draws metrics, `put_first` chooses the sections that come before the others."""

    def __init__(self, metrics: LiveMetrics, *, without: Sequence[str] = ()) -> None:
        """without: names of sections that the screen shows elsewhere."""
        super().__init__()
        self.metrics = metrics
        self.regions: dict[str, Region] = {}
        self._sections = [kind(metrics) for kind in SECTIONS if kind.NAME not in without]
        for section in self._sections:
            section.border_title = numbered_title(section)
        self._first: tuple[str, ...] = ()
        self._by_plan = _PlannedLayout()

    def compose(self) -> ComposeResult:
        yield from self._sections

    def render(self) -> Content:
        """Return the text in the place of sections, before the first answer."""
        if self.regions:
            return Content("")
        lines = Content.styled(_BEFORE, "$quiet").wrap(max(1, self.size.width - 4))
        return Content("\n").join(line.pad_left(2) for line in lines)

    @property
    def layout(self) -> Layout:
        return self._by_plan

    @property
    def shown(self) -> list[Section]:
        """The sections on the screen, the most important first."""
        return [section for section in self._ordered if section.NAME in self.regions]

    @property
    def is_asked(self) -> bool:
        """True if a key has put a section first."""
        return bool(self._first)

    def put_first(self, names: Sequence[str]) -> None:
        """Show these sections before all others."""
        self._first = tuple(names)
        self.show(self.metrics)

    def toggle(self, name: str) -> None:
        """Show a section before all others; put it back if it is the first."""
        names = [other for other in self._first if other != name]
        if self._first[:1] != (name,):
            names.insert(0, name)
        self.put_first(names)

    def show(self, metrics: LiveMetrics) -> None:
        """Draw these metrics."""
        self.metrics = metrics
        self._arrange()
        for section in self.shown:
            section.show(metrics)

    def on_resize(self) -> None:
        self.show(self.metrics)

    @property
    def _ordered(self) -> list[Section]:
        first = [*self._first, *(section.NAME for section in self._sections)]
        return sorted(self._sections, key=lambda section: first.index(section.NAME))

    def _arrange(self) -> None:
        """Place the sections that have something to show; lay out anew if a place changed."""
        if not self.is_mounted or not self.size:
            return
        metrics = self.metrics
        wanted = []
        for section in self._ordered:
            name = section.NAME
            if not section.applies(metrics) and name not in self._first:
                continue
            min_lines = section.MIN_LINES
            usual_lines = min(section.MAX_LINES, _USUAL)
            if self._first[:1] == (name,):  # it gets its usual lines before others get their least
                min_lines = max(min_lines, min(usual_lines, self.size.height))
            is_spare = name in SPARE and name not in self._first
            wanted.append(Wanted(name, min_lines, usual_lines, section.MAX_LINES, section.IS_CHART, is_spare))
        regions = plan(wanted, self.size)
        if regions != self.regions:
            self.regions = regions
            self.refresh()
            for section in self._sections:
                section.display = section.NAME in regions
            self._sections[0].refresh(layout=True)  # a section: that forgets the places known before


class DecodePanel(Vertical):
    """`show` redraws, `fit` takes a new window size; the left edge can be dragged."""

    def __init__(self, metrics: LiveMetrics, settings: ScreenSettings, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metrics = metrics
        self._dragging = False
        self._settings = settings
        self._window = 0  # columns
        self._opens = settings.decode_view  # by itself, in a window that is wide enough; until F3 or the mouse decides
        self._asked: int | None = None  # columns, without those that the chat leaves; None: hidden

    def compose(self) -> ComposeResult:
        yield MeterLines(self.metrics, id="meters")
        yield Sections(self.metrics)

    def show(self, metrics: LiveMetrics, frozen: bool) -> None:
        """Draw these metrics."""
        self.query_one(MeterLines).show(metrics, frozen=frozen)
        self.query_one(Sections).show(metrics)

    def fit(self, window: int) -> None:
        """Take the width that fits in a window of `window` columns."""
        if self._opens and window >= _OPEN_FROM:
            self._opens = False
            self._asked = self._settings.decode_view_width
        self._window = window
        self._take_width()

    def step(self) -> None:
        """Step to the next width: off, narrow, wide. Skip widths that look the same in this window."""
        self._opens = False
        narrow = self._settings.decode_view_width
        wider = [cells for cells in (narrow, narrow + _WIDER) if self._shown(cells) > self._shown(self._asked)]
        self._asked = wider[0] if wider else None
        self._take_width()

    def _shown(self, asked: int | None) -> int:
        """Return the width that is shown for a requested one; 0: hidden."""
        if asked is None or self._window < ROOM_FROM:
            return 0
        return min(asked + self._left_over, self._window - _CHAT)

    @property
    def _left_over(self) -> int:
        """Columns of a wide window that the chat's text does not need, beyond the panel's configured width."""
        return max(0, min(_MOST, self._window - _WHOLE_CHAT) - self._settings.decode_view_width)

    def _take_width(self) -> None:
        """Set the panel's width, or hide it."""
        width = self._shown(self._asked)
        self.display = width > 0
        if width:
            self.styles.width = width
        for toasts in self.screen.query("ToastRack"):
            toasts.styles.padding = (0, width, 0, 0)  # over the chat, not over a chart

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.x == 0:
            self._dragging = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragging:
            self._asked = min(_MOST, max(_LEAST, self._window - int(event.screen_x))) - self._left_over
            self._take_width()

    def on_mouse_up(self) -> None:
        if self._dragging:
            self._dragging = False
            self.release_mouse()
