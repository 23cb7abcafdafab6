"""Key bar: the available keys in one line; a click on one presses it.

It looks like textual's Footer, but is one widget: a change of keys mounts, styles and lays out nothing. Most screens
have one; the keys are the active bindings that have `show`.

Guard: tests/tui/test_narrow.py.
"""

from collections.abc import Iterable

from textual import events
from textual.binding import ActiveBinding, Binding
from textual.content import Content
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from headrace.app.tui.widgets.lines import line_strip

_KEY = "bold $footer-key-foreground on $footer-key-background"
_TEXT = "$footer-description-foreground on $footer-description-background"
_DISABLED = "dim"


class KeyBar(Widget, can_focus=False):
    """Redrawn when the screen's bindings change."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self._line = Content("")
        self._key_cells: list[tuple[range, Binding]] = []  # cells of each key, for clicks

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def _bindings_changed(self, screen: Screen[object]) -> None:
        if screen.app.app_focus and self.is_attached and screen is self.screen:
            self.call_after_refresh(self._lay_out)

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out the keys from the left, the palette's at the right."""
        if not self.is_attached:  # the screen was left before its refresh
            return
        width = self.size.width
        bindings = self.screen.active_bindings
        last = bindings.get(self.app.COMMAND_PALETTE_BINDING)
        shown: dict[str, tuple[Binding, bool]] = {}
        for _, binding, enabled, _ in self._sorted(bindings.values()):
            if binding.show:
                shown.setdefault(binding.action, (binding, enabled))
        end = Content("")
        if last is not None:
            # The line stands in the cell that a key begins with.
            end = Content.assemble(("▏", "$foreground 20%"), self._key(last.binding, last.enabled)[1:])
        line = Content("")
        self._key_cells = []
        room = max(0, width - end.cell_length)
        for binding, enabled in shown.values():
            key = self._key(binding, enabled)
            if line.cell_length + key.cell_length > room:
                break  # no half words
            self._key_cells.append((range(line.cell_length, line.cell_length + key.cell_length), binding))
            line = line + key
        if last:
            self._key_cells.append((range(room, width), last.binding))
        line = Content.assemble(line, " " * (room - line.cell_length), end)
        if not line.is_same(self._line):
            self._line = line
            self.refresh()

    def _sorted(self, bindings: Iterable[ActiveBinding]) -> list[ActiveBinding]:
        """Return the bindings of widgets, then the screen's as it declares them, then the app's."""
        declared = Binding.make_bindings(type(self.screen).BINDINGS)
        indices: dict[str, int] = {}
        for index, binding in enumerate(declared):
            indices.setdefault(binding.key, index)
        owners = (self.screen, self.app)

        def order(active: ActiveBinding) -> int:
            if active.node not in owners:
                return -1
            return indices.get(active.binding.key, len(indices))

        return sorted(bindings, key=order)

    def _key(self, binding: Binding, enabled: bool) -> Content:
        """Return a key's name and description."""
        name = self.app.get_key_display(binding)
        text = binding.description[:1].upper() + binding.description[1:]
        key = Content.assemble((f" {name} ", _KEY), (f"{text} ", _TEXT))
        return key if enabled else key.stylize(_DISABLED)

    def render_line(self, y: int) -> Strip:
        return line_strip(self, self._line if y == 0 else Content(""), self.content_size.width)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        for cells, binding in self._key_cells:
            if event.x in cells:
                self.app.simulate_key(binding.key)
                return
