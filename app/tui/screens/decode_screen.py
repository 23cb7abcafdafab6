"""Decode view of F2: sections, a cursor over the steps, freeze, export, and a line to ask in.

Letters go to the line. `MetricsScreen` is the part that the screen of `headrace top` has, too.

The app opens it with its metrics, and the poller calls `show`. The sections are those of the panel
(`app/tui/decode/panel.py`), the steps stand above them. tests/tui/screens/test_decode_screen.py guards this.
"""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen

from headrace.app.output.explanations import Explanation, of_section
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.meters import MeterLines, whole_why
from headrace.app.tui.decode.panel import MORE, NUMBERED, Sections, numbered_title, section_bindings
from headrace.app.tui.input.ask_line import AskLine
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.textual_overrides.partial_repaint import use_partial_repaint
from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.lines import Section
from headrace.app.tui.widgets.status_bar import Status, StatusBar

_OTHER_LINES = 8  # of the window: status, meters, the line to ask in, keys
_LEAST_STEPS = 9  # lines
_LEAST_SECTIONS = 7  # lines
_STEPS_SHARE = 0.4  # of the lines in a larger window
HEAD = "meters"
"""Id of the head, whose figures are explained first."""


class MetricsScreen(Screen[None]):
    """Status, meters and sections of the metrics that the app passes in, live or frozen. Subclasses compose them."""

    def __init__(self, metrics: LiveMetrics) -> None:
        super().__init__()
        use_partial_repaint(self)
        self.metrics = metrics

    @property
    def section_names(self) -> list[str]:
        """The sections on the screen, the most important first."""
        return [section.NAME for section in self.query_one(Sections).shown]

    @property
    def figures(self) -> list[Explanation]:
        """Explanations of the figures on the screen, in the order of its sections."""
        return list(dict.fromkeys(each for name in (HEAD, *self.section_names) for each in of_section(name)))

    @property
    def why(self) -> str:
        """The present figures in words."""
        return whole_why(self.metrics)

    def show(self, metrics: LiveMetrics, status: Status, *, frozen: bool) -> None:
        """Draw these metrics."""
        self.metrics = metrics
        self.set_class(frozen, "-frozen")
        self.query_one(StatusBar).set_status(status, with_speed=False)
        self.query_one(MeterLines).show(metrics, frozen=frozen)
        self.query_one(Sections).show(metrics)

    def action_section(self, number: int) -> None:
        """Show the section of a number before the others, or put it back."""
        self.query_one(Sections).toggle(NUMBERED[number - 1].NAME)


class DecodeScreen(SingleDismissal, MetricsScreen):
    """Steps above the sections, and a line to ask in below them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,escape", "dismiss(None)", "Back", key_display="F2", priority=True),
        Binding("f1", "app.show_keys", "Help", key_display="F1"),
        Binding("f7", "app.freeze", "Freeze", key_display="F7"),
        Binding("tab", "more", "More", key_display="Tab", priority=True),
        *section_bindings(priority=True),
        Binding("left", "cursor(-1)", "Step back", key_display="←", show=False, priority=True),
        Binding("right", "cursor(1)", "Step on", key_display="→", show=False, priority=True),
        Binding("ctrl+x", "app.export_trace", "Trace", priority=True),
        Binding("f10", "app.time_steps", "Time all steps", key_display="F10"),
        Binding("shift+left,pageup", "cursor(-20)", "20 back", key_display="PgUp", show=False, priority=True),
        Binding("shift+right,pagedown", "cursor(20)", "20 on", key_display="PgDn", show=False, priority=True),
        Binding("ctrl+end", "cursor(100000)", "Newest step", show=False, priority=True),
    ]

    AUTO_FOCUS = ""

    def __init__(self, metrics: LiveMetrics, status: Status, line: AskLine, *, frozen: bool) -> None:
        super().__init__(metrics)
        self.line = line
        self._status = status
        self._frozen = frozen
        self._made = False  # its parts are there
        self._more = False  # the sections on demand stand first
        self._hides_steps = False  # by their key

    def compose(self) -> ComposeResult:
        yield StatusBar(self.metrics, id="status")
        yield MeterLines(self.metrics, id=HEAD)
        steps = LatencySection(self.metrics, with_text=True)
        steps.border_title = numbered_title(steps)
        yield steps
        yield Sections(self.metrics, without=(LatencySection.NAME,))
        yield self.line
        yield KeyBar()

    @property
    def section_names(self) -> list[str]:
        return [LatencySection.NAME, *super().section_names]

    def on_mount(self) -> None:
        for section in self.query(Section):
            if not isinstance(section, LatencySection):  # the mouse walks through its steps
                figures = of_section(section.NAME)
                section.tooltip = Content("\n".join(f"{each.name}: {each.sentence}" for each in figures))
        self._made = True
        self.set_focus(self.line)
        self._draw()

    def show(self, metrics: LiveMetrics, status: Status, *, frozen: bool) -> None:
        """Draw these metrics, once the sections are mounted."""
        self.metrics = metrics
        self._status = status
        self._frozen = frozen
        if self._made:
            self._draw()

    def _draw(self) -> None:
        self._place_steps()
        self.query_one(LatencySection).show(self.metrics)
        super().show(self.metrics, self._status, frozen=self._frozen)

    def _place_steps(self) -> None:
        """Divide the lines between the steps, above, and the other sections.

        A large window has both: the steps get a share of the lines, the sections the others. A small window has no room
        for both, and shows the steps alone. It shows the sections alone instead if a key has put one first, if parallel
        answers have their table among the sections, or if there are no steps to show.
        """
        room = self.size.height - _OTHER_LINES
        is_small = room < _LEAST_STEPS + _LEAST_SECTIONS
        steps = self.query_one(LatencySection)
        sections = self.query_one(Sections)
        # Steps are hidden by their key, or in a small window by the sections.
        hidden = self._hides_steps or (is_small and (sections.is_asked or self.metrics.answers.is_several))
        steps.display = steps.applies(self.metrics) and not hidden
        sections.display = not (is_small and steps.display)
        steps.styles.height = room if is_small else max(_LEAST_STEPS, round(room * _STEPS_SHARE))

    def on_resize(self) -> None:
        if self._made:
            self._place_steps()

    def action_section(self, number: int) -> None:
        """Show the section of a number before the others, or put it back; show or hide the steps."""
        if NUMBERED[number - 1] is LatencySection:
            self._hides_steps = not self._hides_steps
        else:
            super().action_section(number)
        self._draw()

    def action_more(self) -> None:
        """Put the sections on demand first, or the others again."""
        self._more = not self._more
        self.query_one(Sections).put_first(MORE if self._more else ())
        self._draw()

    def action_cursor(self, by: int) -> None:
        """Move the cursor over the steps; in a line with text, its own."""
        if self.line.has_focus and self.line.value and abs(by) == 1:
            self.line.cursor_position += by
        else:
            self.query_one(LatencySection).move_cursor(by)
