"""What is drawn anew, and that it is the same as if everything had been."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual._compositor import Compositor
from textual.geometry import Region
from textual.screen import Screen

from app.tui.decode.section import Section
from app.tui.frugal_screen import FrugalCompositor
from app.tui.help_screen import HelpScreen
from app.tui.key_bar import KeyBar
from app.tui.transcript import Transcript
from tests.tui.conftest import Driver

EMPTY_MOVE = re.compile(r"\x1b\[\d+;\d+H(?=\x1b\[\d+;\d+H|\n|\Z)")  # the cursor goes there, nothing is written
PARTS = st.lists(
    st.builds(Region, st.integers(0, 119), st.integers(0, 39), st.integers(1, 60), st.integers(1, 20)),
    min_size=1,
    max_size=4,
)


def terminal_bytes(screen: Screen[None], drawing: type[Compositor], parts: list[Region]) -> str:
    """What a partial update of these regions sends, made by this class's way of drawing."""
    compositor = screen._compositor
    compositor._dirty_regions.update(part.intersection(screen.size.region) for part in parts)
    update = drawing.render_partial_update(compositor)
    assert update is not None
    return EMPTY_MOVE.sub("", update.render_segments(screen.app.console))


@pytest.mark.parametrize("keys", [(), ("f1",)])
def test_a_partial_update_is_textuals_own(play, keys: tuple[str, ...]) -> None:
    """Also below a dialog, whose ground is the chat."""

    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.press(*keys)
        screen = it.app.chat
        assert screen is not None

        @settings(max_examples=60, deadline=None)
        @given(PARTS)
        def same(parts: list[Region]) -> None:
            assert terminal_bytes(screen, FrugalCompositor, parts) == terminal_bytes(screen, Compositor, parts)

        same()

    play(scenario)


def test_a_key_draws_the_input_and_nothing_else(play, monkeypatch: pytest.MonkeyPatch) -> None:
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

    play(scenario)


def test_a_section_draws_only_lines_that_came_out_different(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        section = it.app.chat.query_one("#bandwidth", Section)  # type: ignore[union-attr]
        section.redraw()
        await it.pilot.pause()
        before = list(section._lines)
        section.redraw()
        assert before
        assert all(line is kept for line, kept in zip(section._lines, before, strict=True))
        assert not section._repaint_regions

    play(scenario)


def test_a_click_on_a_key_presses_it(play) -> None:
    async def scenario(it: Driver) -> None:
        bar = it.app.screen.query_one(KeyBar)
        at = bar.render_line(0).text.index("Help")
        await it.pilot.click(KeyBar, offset=(at, 0))
        await it.pilot.pause()
        assert isinstance(it.app.screen, HelpScreen)

    play(scenario)
