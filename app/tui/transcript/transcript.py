"""The transcript: one widget that draws lines and scrolls itself, for any number of messages.

It follows the end until it is scrolled up. A ScrollView would lay out the screen with every new line; this draws
changed lines only. Messages can be selected by key; the chat's screen carries out actions on them.

    entries: a message each -> _rows: all rows of all entries -> rows top .. top + height are in view
    _starts: the first row of each entry. They change together, in `_make_rows` and `extend_last_line` alone.

The screens of the chat and of parallel answers call `show`, or `extend_last_line` for a few words that change one line.
tests/tui/test_text_flow.py compares lines that were extended with a whole layout.
"""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region
from textual.message import Message as Event
from textual.reactive import reactive
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from headrace.app.sessions.records import Message
from headrace.app.sessions.search import best_line
from headrace.app.tui.textual_overrides.partial_repaint import put, repaint
from headrace.app.tui.transcript.entry import BLANK, Entry, LayoutOptions, MessageState, ShownRow, branch_at
from headrace.app.tui.transcript.find import Find, seek
from headrace.app.tui.transcript.row_strips import GUTTER, RowStrips
from headrace.app.tui.widgets.lines import LONGEST_LINE, folded

_MARGIN = 2  # cells right of the text
_WHEEL = 3  # lines a turn of the wheel moves
_FAST = 2  # lines between two layouts, from which on room is left for the next ones
_ROOM_SHARE = 4  # the room is a fourth of the height at most
_MORE_BELOW = "↓ new text below: Ctrl+End"

SCROLL_KEYS: list[BindingType] = [
    Binding("pageup", "scroll_text('page_up')", "Page up", show=False, priority=True),
    Binding("pagedown", "scroll_text('page_down')", "Page down", show=False, priority=True),
    Binding("ctrl+home", "scroll_text('start')", "Top", show=False, priority=True),
    Binding("ctrl+end", "scroll_text('end')", "End", show=False, priority=True),
    Binding("ctrl+l", "app.redraw", "Redraw", show=False, priority=True),
]
"""For a screen whose `action_scroll_text` calls `Transcript.scroll_text`."""


class Transcript(Widget, can_focus=True):
    """Shows messages; `show` brings it up to date."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "select(-1)", "Message up"),
        Binding("down,j", "select(1)", "Message down"),
        Binding("enter", "fold", "Fold"),
        Binding("c", "act('copy')", "Copy"),
        Binding("b", "act('copy_code')", "Copy code"),
        Binding("o", "act('open_link')", "Open link"),
        Binding("e", "act('edit')", "Edit"),
        Binding("u", "act('undo')", "Send all again", show=False),
        Binding("d", "act('remove')", "Delete", show=False),
        Binding("r", "act('regenerate')", "Regenerate"),
        Binding("n", "act('continue')", "Continue"),
        Binding("left_square_bracket", "act('branch_back')", "Branch ‹", key_display="["),
        Binding("right_square_bracket", "act('branch_on')", "Branch ›", key_display="]"),
        Binding("home,g", "to_start", "Top", show=False),
        Binding("end,G", "to_end", "End", show=False),
        Binding("escape", "leave", "Back to input", show=False),
    ]

    FOCUS_ON_CLICK = False  # the keys stay with the input: only Ctrl+Up and /messages take them here

    show_thinking = reactive(False)
    show_summary = reactive(True)

    @dataclass
    class Act(Event):
        """Posted for an action on a message."""

        action: str
        message: Message

    class Left(Event):
        """Posted when the keys go back to the prompt."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.entries: list[Entry] = []
        self.selected: int | None = None
        """Index of the selected entry, None while the keys are elsewhere."""
        self.top = 0
        """The first line in view."""
        self.following = True
        """At the end, and to stay there."""
        self.more_below = False
        """Text came below what is in view since it was scrolled up."""
        self._room = 0  # free lines below a growing answer, for text before the next layout
        self._laid_out = 0  # lines there were then
        self._options: LayoutOptions | None = None  # of the rows
        self._match: Find | None = None  # the match that the find bar shows
        self._starts: list[int] = []  # first line of every entry
        self._rows: list[ShownRow] = []
        self._strips = RowStrips(self)
        self._logo: Sequence[Content] = ()  # above the welcome text
        self._welcome: Sequence[Content] = ()

    # -- content ---------------------------------------------------------------------------------------------------

    def show(self, messages: Sequence[Message], message_states: Sequence[MessageState]) -> None:
        """Bring the entries up to date; code in a growing answer has no colours until `highlight_code`."""
        keep = 0  # leading entries of the same messages, which stay
        while keep < min(len(messages), len(self.entries)) and self.entries[keep].message.id == messages[keep].id:
            keep += 1
        first = keep  # the first entry whose rows are made again
        for index in range(keep):
            if self.entries[index].update(messages[index], message_states[index]):
                first = min(first, index)
        if len(messages) != len(self.entries):  # another answer begins: nothing is known of its speed
            self._room = 0
            self._laid_out = sys.maxsize
        del self.entries[keep:]
        self.entries += [Entry(messages[n], message_states[n]) for n in range(keep, len(messages))]
        if self.selected is not None and self.selected >= len(self.entries):
            self.selected = None
            if self.entries:
                self.selected = len(self.entries) - 1
        self._lay_out(first)

    def extend_last_line(self, message: Message) -> bool:
        """Draw a few plain words appended to the answer, if they fit below; `show` draws everything else."""
        if not self.entries or not self.following or self._match is not None or self.text_selection is not None:
            return False
        typed = self.entries[-1].extend_last_line(message)
        if typed is None:
            return False
        index, rows = typed
        first = self._starts[-1] + index
        width, height = self.size  # read once: textual looks it up on the screen
        if first + len(rows) - 1 > self.top + height:  # but for the blank line below
            return False
        del self._rows[first:]
        self._rows += rows
        num_visible = min(len(rows), self.top + height - first)
        return put(self, Region(0, first - self.top, width, num_visible))

    def highlight_code(self) -> None:
        """Give the growing answer's code its colours."""
        if self.entries and self.entries[-1].highlight_code():
            self._lay_out(len(self.entries) - 1)

    def welcome(self, logo: Sequence[Content], lines: Sequence[Content]) -> None:
        """Set the text of an empty conversation. logo: left out where it does not fit above the lines."""
        self._logo = logo
        self._welcome = lines
        if not self.entries:
            self._lay_out(0)

    # -- scrolling -------------------------------------------------------------------------------------------------

    @property
    def _last_top(self) -> int:
        return max(0, len(self._rows) + self._room - self.size.height)

    def scroll_lines(self, by: int) -> None:
        """Scroll down by lines, up if negative; at the end, follow it."""
        top = min(self._last_top, max(0, self.top + by))
        self.following = top == self._last_top
        more_below = self.more_below and not self.following
        if top != self.top or more_below != self.more_below:
            self.top = top
            self.more_below = more_below
            self.refresh()

    def scroll_pages(self, by: int) -> None:
        """Scroll by pages of the height less two lines."""
        self.scroll_lines(by * max(1, self.size.height - 2))

    def scroll_text(self, where: str) -> None:
        """Scroll as a key of SCROLL_KEYS asks: `page_up`, `page_down`, `start` or `end`."""
        if where == "page_up":
            self.scroll_pages(-1)
        elif where == "page_down":
            self.scroll_pages(1)
        elif where == "start":
            self.action_to_start()
        else:
            self.to_end()

    def to_end(self) -> None:
        """Go to the end and follow it."""
        self._room = 0
        self.scroll_lines(len(self._rows))

    def go_to(self, message_id: int, words: str) -> None:
        """Scroll to the line of a message with most of the words, or to its first."""
        index = next((n for n, entry in enumerate(self.entries) if entry.message.id == message_id), None)
        if index is None:
            return
        lines = self._lines_of(index)
        best = best_line([self._rows[line].content.plain for line in lines], words)
        self._bring_into_view(lines.start + (best or 0))

    def _bring_into_view(self, line: int) -> None:
        """Scroll to a line that is out of view."""
        if not self.top <= line < self.top + self.size.height:
            self.scroll_lines(line - self.size.height // 3 - self.top)

    def find(self, words: str, by: int) -> tuple[int, int]:
        """Show the match before (-1) or after (1) the last one, or the newest (0); return its number and the count."""
        last = None
        if self._match is not None and by:
            last = self._match.begins
        texts = []
        if self.entries:  # the welcome text is not searched
            texts = [content.plain for content, _ in self._rows]
        self._match = seek(texts, words, last, by)
        self.refresh()
        if self._match is None:
            return 0, 0
        line, _ = self._match.begins
        self._bring_into_view(line)
        return self._match.number, self._match.count

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_lines(-_WHEEL)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_lines(_WHEEL)

    @property
    def has_thinking(self) -> bool:
        """True if there is a thinking section."""
        return any(kind == "thinking" for _, kind in self._rows)

    @property
    def look(self) -> LayoutOptions:
        """Options for the layout of entries at the present size and theme."""
        width = max(12, min(LONGEST_LINE, self.size.width - GUTTER - _MARGIN))
        theme = self.app.current_theme
        return LayoutOptions(
            width,
            ansi=self.app.native_ansi_color,
            dark=theme.dark,
            show_thinking=self.show_thinking,
            show_summary=self.show_summary,
        )

    def _lay_out(self, first: int) -> None:
        """Make the rows again from entry `first` on; repaint those that changed."""
        if not self.size.width:
            return
        if not self.entries or not self._starts:
            first = 0
            num_kept = 0
        elif first < len(self._starts):
            num_kept = self._starts[first]
        else:
            num_kept = len(self._rows)
        old_rows = self._rows[num_kept:]
        old_view = (self.top, self.more_below, self._thumb)
        if self._match is not None and max(self._match.spans) >= num_kept:
            self._match = None  # it may be somewhere else now
        self._make_rows(first, num_kept)
        self._keep_room()
        self._keep_view(is_longer=0 < num_kept + len(old_rows) < len(self._rows))
        if (self.top, self.more_below, self._thumb) != old_view:
            repaint(self, self.size.region)
        else:
            self._repaint_changed(num_kept, old_rows)

    def _make_rows(self, first: int, num_kept: int) -> None:
        """Replace the rows after the first `num_kept` by those of the entries from `first` on."""
        if not self.entries:
            self._starts.clear()
            self._rows = [ShownRow(line, "body") for line in self._centred_welcome()]
            return
        del self._rows[num_kept:], self._starts[first:]
        options = self.look
        self._options = options
        if not first:
            self._rows = [BLANK]
        for entry in self.entries[first:]:
            self._starts.append(len(self._rows))
            self._rows += entry.rows(options)

    def _keep_room(self) -> None:
        """Keep lines free below a growing answer.

        Text that comes before the next layout is drawn there by `extend_last_line`, without scrolling. A fast answer
        needs as many lines as the latest layout added.
        """
        if not self.entries:
            return
        if not self.entries[-1].state.growing:
            self._room = 0
            return
        grown = len(self._rows) - self._laid_out
        self._laid_out = len(self._rows)
        if grown >= _FAST:
            self._room = max(self._room, min(grown + 1, self.size.height // _ROOM_SHARE))

    def _keep_view(self, *, is_longer: bool) -> None:
        """Stay at the end while that is followed; else note that there is more below, if rows were added."""
        self.top = min(self.top, self._last_top)
        if self.following and self.entries:
            self.top = self._last_top
        self.more_below = bool(self.entries) and not self.following and (self.more_below or is_longer)

    def _repaint_changed(self, num_kept: int, old_rows: Sequence[ShownRow]) -> None:
        """Repaint from the first to the last row that is another one than before.

        An entry keeps the content of a line that did not change, so identity tells them apart.
        """
        pairs = zip_longest(old_rows, self._rows[num_kept:])  # None where one of both has fewer rows
        changed = [
            line
            for line, (old, new) in enumerate(pairs, num_kept)
            if old is None or new is None or old.content is not new.content
        ]
        if changed:
            first = changed[0]
            rows = Region(0, first - self.top, self.size.width, changed[-1] + 1 - first)
            repaint(self, rows.intersection(self.size.region))

    def _centred_welcome(self) -> list[Content]:
        """Return the welcome text in the middle of the width, a third down; the logo if it fits above."""
        width = max(1, self.size.width - GUTTER - _MARGIN)
        welcome = [part for line in self._welcome for part in folded(line, width)]
        if len(self._logo) + len(welcome) <= self.size.height:
            welcome = [*self._logo, *welcome]
        above = max(0, (self.size.height - len(welcome)) // 3)
        block = max((line.cell_length for line in welcome), default=0)
        indent = max(0, (self.size.width - block) // 2 - GUTTER)
        return [Content("")] * above + [line.pad_left(indent) for line in welcome]

    def _start_over(self) -> None:
        """Make all rows again: size, theme or folding changed."""
        self._starts.clear()
        self._rows.clear()
        self._lay_out(0)

    def on_resize(self) -> None:
        self._room = 0
        if self.look == self._options:  # another height only: rows stay, and so does the match in them
            self._lay_out(len(self.entries))
        else:
            self._start_over()
        self.scroll_lines(0)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()
        if self._rows:
            self._start_over()

    def watch_show_summary(self) -> None:
        self._start_over()

    def watch_show_thinking(self) -> None:
        self._start_over()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of a region, bypassing the style cache of textual."""
        rows = self._rows
        thumb = self._thumb
        marked = self._marked
        selection = self.text_selection
        size = self.size
        finds = {}  # columns of the text that was found, by line
        if self._match is not None:
            finds = {line: (start + GUTTER, end + GUTTER) for line, (start, end) in self._match.spans.items()}
        strips = []
        for y in crop.line_range:
            line = y + self.top
            span = selection.get_span(line) if selection is not None else finds.get(line)
            if self.more_below and y == size.height - 1:
                strip = self._strips.banner(_MORE_BELOW, size.width, thumb=y in thumb)
            elif line >= len(rows):
                strip = self._strips.strip(BLANK, size.width, thumb=y in thumb)
            else:
                strip = self._strips.strip(rows[line], size.width, thumb=y in thumb, marked=line in marked, span=span)
            strips.append(strip)
        if crop.column_span == (0, size.width):
            return strips
        return [strip.crop(crop.x, crop.right) for strip in strips]

    def render_line(self, y: int) -> Strip:
        """Return a line with character positions, for the mouse only."""
        line = min(y + self.top, len(self._rows) - 1)
        return self._strips.located(line, self._rows[line] if self._rows else BLANK)

    @property
    def _marked(self) -> range:
        """Lines of the selected message while the transcript has the focus."""
        if self.selected is None or self.selected >= len(self._starts) or not self.has_focus:
            return range(0)
        return self._lines_of(self.selected)

    @property
    def _thumb(self) -> range:
        """Lines beside which the scroll bar's thumb shows; none if everything is in view."""
        height = self.size.height
        total = len(self._rows) + self._room
        if total <= height or not self.entries:
            return range(0)
        length = max(1, height * height // total)
        start = round(self.top / max(1, total - height) * (height - length))
        return range(start, start + length)

    def _lines_of(self, index: int) -> range:
        """Return the rows of an entry."""
        ends = [*self._starts[1:], len(self._rows)]
        return range(self._starts[index], ends[index])

    def _entry_at(self, line: int) -> int:
        return bisect_right(self._starts, line) - 1

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        text = "\n".join(" " * GUTTER + content.plain for content, _ in self._rows)
        picked = selection.extract(text)
        return "\n".join(line.removeprefix(" " * GUTTER).rstrip() for line in picked.split("\n")), "\n"

    def selection_updated(self, selection: Selection | None) -> None:  # noqa: ARG002
        self.refresh()

    # -- keys and mouse --------------------------------------------------------------------------------------------

    def action_select(self, by: int) -> None:
        """Select the message above or below, and scroll to it."""
        if not self.entries:
            return
        last = len(self.entries) - 1
        selected = self.selected
        if selected is None:  # the first key upwards selects the last message
            selected = last
            if by < 0:
                selected = last + 1
        self.selected = min(last, max(0, selected + by))
        self._show_details()
        lines = self._lines_of(self.selected)
        if lines.start < self.top or len(lines) >= self.size.height:
            self.scroll_lines(lines.start - self.top)
        elif lines.stop > self.top + self.size.height:
            self.scroll_lines(lines.stop - self.size.height - self.top)
        self.refresh()

    def _show_details(self) -> None:
        """Show all metrics of the selected message, short ones of the others."""
        self.refresh_bindings()
        different = [index for index, entry in enumerate(self.entries) if entry.detail(index == self.selected)]
        if different:
            self._lay_out(different[0])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Treat letters as commands only while a message is selected."""
        if action in ("act", "select") and self.selected is None:
            return False
        if action == "fold":
            return self._section is not None
        return super().check_action(action, parameters)

    @property
    def _section(self) -> str | None:
        """Kind of the selected message's section that can be folded."""
        if self.selected is None or self.selected >= len(self._starts):
            return None
        kinds = {self._rows[line].kind for line in self._lines_of(self.selected)}
        return next((kind for kind in ("summary", "thinking") if kind in kinds), None)

    def _fold(self, section: str | None) -> None:
        if section == "thinking":
            self.show_thinking = not self.show_thinking
        elif section == "summary":
            self.show_summary = not self.show_summary

    def action_fold(self) -> None:
        """Fold or unfold the selected message's section."""
        self._fold(self._section)
        self.action_select(0)

    def action_act(self, action: str) -> None:
        if self.selected is not None:
            self.post_message(self.Act(action, self.entries[self.selected].message))

    def action_to_start(self) -> None:
        self.scroll_lines(-len(self._rows))

    def action_to_end(self) -> None:
        self.to_end()

    def action_leave(self) -> None:
        self.post_message(self.Left())

    def on_click(self, event: events.Click) -> None:
        """Switch branches at ‹1/2›; select the message if the transcript has the focus; fold a section at its head."""
        line = event.y + self.top
        if 0 <= line < len(self._rows) and self.entries:
            if by := branch_at(self._rows[line], event.x - GUTTER):
                action = "branch_on" if by > 0 else "branch_back"
                self.post_message(self.Act(action, self.entries[self._entry_at(line)].message))
                return
            if self.has_focus:
                self.selected = self._entry_at(line)
            self._fold(self._rows[line].kind)
            self._show_details()
            self.refresh()

    def on_blur(self) -> None:
        self.selected = None
        self._show_details()
        self.refresh()
