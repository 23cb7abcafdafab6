"""The conversation on the screen: one scrolling widget that draws lines, whatever the number of messages.

It follows the tail while it stands at the end and stays put when it was scrolled up. A message can be selected
with the keys; what can be done with it is the chat screen's business (see the messages below).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.message import Message as Event
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions

from app.sessions.records import Message
from app.tui.entry import Entry, Look, Row, Standing

_GUTTER = 3  # cells left of the text: the selection mark and air
_MARGIN = 2  # cells right of it
_READABLE = 104  # lines longer than this are hard to read
_STRIPS_KEPT = 4000


class Transcript(ScrollView, can_focus=True):
    """Shows entries; `show` brings it up to date."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "select(-1)", "Message up"),
        Binding("down,j", "select(1)", "Message down"),
        Binding("c", "act('copy')", "Copy"),
        Binding("b", "act('copy_code')", "Copy code"),
        Binding("e", "act('edit')", "Edit"),
        Binding("r", "act('regenerate')", "Regenerate"),
        Binding("n", "act('continue')", "Continue"),
        Binding("left_square_bracket", "act('branch_back')", "Branch ‹", key_display="["),
        Binding("right_square_bracket", "act('branch_on')", "Branch ›", key_display="]"),
        Binding("home", "scroll_home", "Top", show=False),
        Binding("end", "to_end", "End", show=False),
        Binding("escape", "leave", "Back to input", show=False),
    ]

    show_thinking = reactive(False)

    @dataclass
    class Act(Event):
        """Something is to be done with a message."""

        action: str
        message: Message

    @dataclass
    class Left(Event):
        """The keys go back to the input."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.entries: list[Entry] = []
        self.selected: int | None = None
        """Index of the selected entry; the last one is meant where there is none."""
        self._starts: list[int] = []  # first line of every entry
        self._rows: list[Row] = []
        self._strips: dict[int, tuple[Content, Strip]] = {}
        self._welcome: list[Content] = []

    # -- content ---------------------------------------------------------------------------------------------------

    def show(self, messages: Sequence[Message], standings: Sequence[Standing]) -> None:
        """Bring the entries up to date with the conversation."""
        keep = 0
        while keep < min(len(messages), len(self.entries)) and self.entries[keep].message.id == messages[keep].id:
            keep += 1
        first = len(self.entries) if keep == len(self.entries) else keep
        for place in range(keep):
            if self.entries[place].update(messages[place], standings[place]):
                first = min(first, place)
        del self.entries[keep:]
        self.entries += [Entry(messages[n], standings[n]) for n in range(keep, len(messages))]
        if self.selected is not None and self.selected >= len(self.entries):
            self.selected = None
        self._lay_out(min(first, keep if keep < len(messages) else first))

    def welcome(self, lines: Sequence[Content]) -> None:
        """What stands here while nothing has been said."""
        self._welcome = list(lines)
        if not self.entries:
            self._lay_out(0)

    def to_end(self) -> None:
        """Go to the end and follow it from now on."""
        self.scroll_end(animate=False, immediate=True)

    @property
    def chosen(self) -> Entry | None:
        """The selected entry, else the last."""
        if not self.entries:
            return None
        return self.entries[self.selected if self.selected is not None else -1]

    @property
    def look(self) -> Look:
        width = max(12, min(_READABLE, self.scrollable_content_region.width - _GUTTER - _MARGIN))
        theme = self.app.current_theme
        return Look(width, ansi=self.app.native_ansi_color, dark=theme.dark, show_thinking=self.show_thinking)

    def _lay_out(self, first: int) -> None:
        """Recompute the rows from entry `first` on, keep the tail in view if it was."""
        if not self.size.width:
            return
        follow = self.is_vertical_scroll_end or self.max_scroll_y == 0
        before = len(self._rows)
        kept = self._starts[first] if first < len(self._starts) else len(self._rows)
        if not self.entries or not self._starts:
            first = kept = 0
        del self._rows[kept:], self._starts[first:]
        look = self.look
        for entry in self.entries[first:]:
            self._starts.append(len(self._rows))
            self._rows += entry.rows(look)
        if not self.entries:
            self._rows = [(line, "body") for line in self._centred_welcome()]
        if len(self._strips) > _STRIPS_KEPT:
            self._strips.clear()
        self.virtual_size = Size(self.size.width, len(self._rows))
        if follow and self.entries and len(self._rows) != before:
            self.scroll_end(animate=False, immediate=True)
        self.refresh_lines(max(0, kept), max(before, len(self._rows)) - kept + 1)

    def _centred_welcome(self) -> list[Content]:
        above = max(0, (self.size.height - len(self._welcome)) // 3)
        block = max((line.cell_length for line in self._welcome), default=0)
        indent = max(0, (self.size.width - block) // 2 - _GUTTER)
        return [Content("")] * above + [line.pad_left(indent) for line in self._welcome]

    def _start_over(self) -> None:
        self._strips.clear()
        self._starts.clear()
        self._rows.clear()
        self._lay_out(0)

    def on_resize(self, event: events.Resize) -> None:  # noqa: ARG002
        follow = self.is_vertical_scroll_end
        self._start_over()
        if follow and self.entries:
            self.scroll_end(animate=False, immediate=True)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()
        if self._rows:
            self._start_over()

    def watch_show_thinking(self) -> None:
        self._start_over()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        width = self.size.width
        if line >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        selection = self.text_selection
        span = selection.get_span(line) if selection is not None else None
        content, kind = self._rows[line]
        marked = self.selected is not None and self.has_focus and self._entry_at(line) == self.selected
        if span is None and not marked:
            kept = self._strips.get(id(content))
            if kept is not None and kept[0] is content and kept[1].cell_length == width:
                return kept[1].apply_offsets(0, line)
        gutter = "▌".ljust(_GUTTER) if marked else " " * _GUTTER
        whole = Content.assemble((gutter, "$accent"), content)
        if kind == "user":
            whole = whole.pad_right(max(0, width - whole.cell_length)).stylize_before("on $surface")
        if span is not None:
            start, end = span
            style = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            whole = whole.stylize(style, start, len(whole.plain) if end == -1 else end)
        options = RenderOptions(self._get_style, self.styles.get_rules())
        strips = whole.render_strips(width, 1, self.visual_style, options)
        strip = (strips[0] if strips else Strip([])).adjust_cell_length(width, self.rich_style)
        if span is None and not marked:
            self._strips[id(content)] = (content, strip)
        return strip.apply_offsets(0, line)

    def _entry_at(self, line: int) -> int:
        return bisect_right(self._starts, line) - 1

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        text = "\n".join(" " * _GUTTER + content.plain for content, _ in self._rows)
        picked = selection.extract(text)
        return "\n".join(line.removeprefix(" " * _GUTTER).rstrip() for line in picked.split("\n")), "\n"

    def selection_updated(self, selection: Selection | None) -> None:  # noqa: ARG002
        self.refresh()

    # -- keys and mouse --------------------------------------------------------------------------------------------

    def action_select(self, by: int) -> None:
        """Select the message above or below, and bring it into view."""
        if not self.entries:
            return
        at = self.selected if self.selected is not None else len(self.entries) - (0 if by < 0 else 1)
        self.selected = min(len(self.entries) - 1, max(0, at + by))
        top = self._starts[self.selected]
        bottom = self._starts[self.selected + 1] if self.selected + 1 < len(self._starts) else len(self._rows)
        view = self.scrollable_content_region.height
        if top < self.scroll_offset.y or bottom - top >= view:
            self.scroll_to(y=top, animate=False)
        elif bottom > self.scroll_offset.y + view:
            self.scroll_to(y=bottom - view, animate=False)
        self.refresh()

    def action_act(self, action: str) -> None:
        if self.chosen is not None:
            self.post_message(self.Act(action, self.chosen.message))

    def action_to_end(self) -> None:
        self.to_end()

    def action_leave(self) -> None:
        self.post_message(self.Left())

    def on_click(self, event: events.Click) -> None:
        """Select what was clicked; on a thinking section's head, open or close it."""
        line = event.y + self.scroll_offset.y
        if 0 <= line < len(self._rows) and self.entries:
            self.selected = self._entry_at(line)
            if self._rows[line][1] == "thinking":
                self.show_thinking = not self.show_thinking
            self.refresh()

    def on_blur(self) -> None:
        self.selected = None
        self.refresh()
