"""Regions drawn anew, and that the result is the same as a whole drawing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual._compositor import CompositorUpdate
from textual.geometry import Region

from headrace.app.tui.decode.panel import DecodePanel
from headrace.app.tui.screens.help_screen import HelpScreen
from headrace.app.tui.textual_overrides.partial_repaint import PartialRepaint, PlacedLines, repaint
from headrace.app.tui.transcript.row_strips import GUTTER
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.lines import Section
from tests.tui.conftest import Driver

SEQUENCE = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[([\d;]*)m|(.)", re.DOTALL)
Cells = dict[tuple[int, int], tuple[str, str]]  # by row and column: what stands there, and how
PARTS = st.lists(
    st.builds(Region, st.integers(0, 119), st.integers(0, 39), st.integers(1, 60), st.integers(1, 20)),
    min_size=1,
    max_size=4,
)


def drawn(update: str) -> Cells:
    """The cells that these bytes write; the second half of a wide character is written with the first."""
    cells: Cells = {}
    row = column = 0
    style = ""
    for move_row, move_column, look, character in SEQUENCE.findall(update):
        if move_row:
            row = int(move_row) - 1
            column = int(move_column) - 1
        elif character and character != "\n":
            for half in range(cell_len(character)):
                cells[row, column + half] = (character, style)
            column += cell_len(character)
        elif not character:
            style = "" if look == "0" else look
    return cells


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [(), ("f1",)])
def test_a_partial_update_shows_what_a_full_one_would(play, keys: tuple[str, ...]) -> None:
    """Also below a dialog, whose ground is the chat."""

    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.press(*keys)
        screen = it.app.poller.chat
        assert screen is not None
        compositor = screen._compositor
        whole = drawn(compositor.render_full_update().render_segments(it.app.console))
        places = [region.intersection(clip) for region, clip in compositor.visible_widgets.values()]
        assert isinstance(compositor, PartialRepaint)

        @given(PARTS | st.lists(st.sampled_from([place.shrink((1, 1, 1, 1)) for place in places if place.area > 400])))
        def same(parts: list[Region]) -> None:
            parts = [shown for part in parts if (shown := part.intersection(screen.size.region))]
            compositor._dirty_regions.update(parts)
            update = compositor.render_partial_update()
            cells = drawn(update.render_segments(it.app.console)) if update is not None else {}
            assert cells.items() <= whole.items()
            assert cells.keys() >= {(y, x) for part in parts for y in part.line_range for x in part.column_range}
            assert not compositor._dirty_regions

        same()

    play(scenario, painted=True)


def test_a_change_inside_one_widget_is_drawn_without_the_others(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        compositor = it.app.poller.chat._compositor  # type: ignore[union-attr]
        region, _ = compositor.visible_widgets[it.transcript]
        compositor._dirty_regions.add(Region(region.x, region.y + 1, region.width, 3))
        update = compositor.render_partial_update()
        assert isinstance(update, PlacedLines)
        assert {y for y, _ in drawn(update.render_segments(it.app.console))} == set(range(region.y + 1, region.y + 4))

    play(scenario, painted=True)


def test_the_mouse_selects_letters_of_the_transcript(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        line = next(n for n, (_, kind) in enumerate(it.transcript._rows) if kind == "body") - it.transcript.top
        assert it.transcript._rows[line][0].plain == "Hello, world."
        await it.pilot.mouse_down(Transcript, offset=(GUTTER + 7, line))
        await it.pilot.hover(Transcript, offset=(GUTTER + 11, line))
        await it.pilot.mouse_up(Transcript, offset=(GUTTER + 11, line))
        assert it.app.screen.get_selected_text() == "world"

    play(scenario, painted=True)


def test_a_key_redraws_the_input_only(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        asked = []
        for kind in (Transcript, Section, KeyBar):
            original = kind.render_lines
            monkeypatch.setattr(
                kind, "render_lines", lambda self, crop, original=original: asked.append(self) or original(self, crop)
            )
        await it.press("x")
        assert it.prompt.text == "x"
        assert asked == []

    play(scenario, painted=True)


def test_a_section_keeps_strips_of_unchanged_lines(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        section = it.app.poller.chat.query_one("#step", Section)  # type: ignore[union-attr]
        section.redraw()
        await it.pilot.pause()
        before = list(section._lines)
        section.redraw()
        assert before
        assert all(line is kept for line, kept in zip(section._lines, before, strict=True))
        assert not section._repaint_regions

    play(scenario, painted=True)


def test_sections_that_come_and_go_leave_nothing_of_the_old_layout(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft tokens of a turn change the panel's sections, and are drawn before textual lays them out."""

    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        chat = it.app.poller.chat
        assert chat is not None
        compositor = chat._compositor
        console = it.app.console
        terminal = drawn(compositor.render_full_update().render_segments(console))
        render = PartialRepaint.render_update

        def render_update(self: PartialRepaint, **options: object):  # type: ignore[no-untyped-def]
            update = render(self, **options)  # type: ignore[arg-type]
            if isinstance(update, CompositorUpdate):
                terminal.update(drawn(update.render_segments(console)))
            return update

        monkeypatch.setattr(PartialRepaint, "render_update", render_update)
        metrics = it.state.metrics
        panel = chat.query_one(DecodePanel)
        for _ in range(3):
            panel.show(metrics, frozen=False)
            for section in panel.query(Section):
                section.redraw()
            repaint(chat.query_one(Transcript), Region(0, 0, 20, 1))  # asks textual for its place
            await it.pilot.pause()
            await it.pilot.pause()
            assert terminal == drawn(compositor.render_full_update().render_segments(console))

    play(scenario, painted=True)


def test_a_click_on_a_key_presses_it(play) -> None:
    async def scenario(it: Driver) -> None:
        bar = it.app.screen.query_one(KeyBar)
        at = bar.render_line(0).text.index("Help")
        await it.pilot.click(KeyBar, offset=(at, 0))
        await it.pilot.pause()
        assert isinstance(it.app.screen, HelpScreen)

    play(scenario, painted=True)


def test_a_removed_key_bar_is_not_redrawn(play) -> None:
    """Drawing waits for a refresh, and that may come when the bar is in no screen any more."""

    async def scenario(it: Driver) -> None:
        bar = it.app.screen.query_one(KeyBar)
        bar._bindings_changed(bar.screen)
        await bar.remove()
        await it.pilot.pause()
        assert not bar.is_attached

    play(scenario, painted=True)
