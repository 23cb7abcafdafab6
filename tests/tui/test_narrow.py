"""Windows of any width: the chat keeps its room, the decode panel takes what is left or waits for more."""

from itertools import pairwise

import pytest
from textual import events
from textual.geometry import Region
from textual.widget import Widget

from headrace.app.config.settings import ScreenSettings, Settings
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.panel import Sections
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.lines import Section
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver

LEAST_CHAT = 60
SIZES = [
    (120, 40),
    (51, 40),
    (48, 10),
    (46, 1),
    (66, 24),
    (62, 40),
    (54, 2),
    (53, 24),
    (5, 40),
    (1, 1),
    (90, 24),
    (89, 24),
    (106, 9),
    (200, 50),
]


def widths(it: Driver) -> tuple[int, int]:
    """Return the widths of the chat's column and of the panel, 0 where it does not show."""
    chat = it.app.poller.chat.query_one("#chat-column")  # type: ignore[union-attr]
    beside = it.app.poller.chat.query_one("#panel")  # type: ignore[union-attr]
    return chat.region.width, beside.region.width if beside.display else 0


def asked(columns: int) -> Settings:
    return Settings(screen=ScreenSettings(decode_view_width=columns))


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [46, 120])
def test_the_chat_keeps_its_minimum_width_in_every_window(play, columns: int) -> None:
    async def scenario(it: Driver) -> None:
        for sizes, _ in ((SIZES, "narrow"), (SIZES[::3], "wide or off"), (SIZES[1::3], "off or narrow")):
            before = widths(it)
            for width, height in sizes:
                await it.pilot.resize_terminal(width, height)
                await it.until(lambda width=width: sum(widths(it)) == width)
                assert widths(it)[0] >= min(LEAST_CHAT, width)
            await it.pilot.resize_terminal(120, 40)
            await it.until(lambda before=before: widths(it) == before)
            await it.press("f3")

    play(scenario, settings=asked(columns), painted=True)


def test_a_message_can_be_sent_in_a_window_of_a_few_columns(play) -> None:
    async def scenario(it: Driver) -> None:
        for turn, width in enumerate((1, 2, 3, 6, 10)):
            await it.pilot.resize_terminal(width, 6)
            await it.press("h", "i")
            await it.press("enter")
            await it.idle()
            assert it.said[2 * turn :: 2] == ["hi"]
            await it.pilot.resize_terminal(120, 40)
            assert "Hello, world." in it.text()

    play(scenario, size=(1, 6), painted=True)


def test_f3_reports_a_window_too_narrow_for_the_panel(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.pilot.resize_terminal(89, 40)
        await it.press("f3")
        assert "the panel needs" in it.text()
        assert widths(it) == (89, 0)
        await it.pilot.resize_terminal(90, 40)
        assert widths(it) == (60, 30)
        await it.pilot.resize_terminal(120, 40)
        assert widths(it) == (74, 46)

    play(scenario)


def test_the_panel_opens_when_a_small_window_grows(play) -> None:
    async def scenario(it: Driver) -> None:
        assert widths(it) == (80, 0)
        await it.pilot.resize_terminal(120, 40)
        assert widths(it) == (74, 46)
        await it.pilot.resize_terminal(80, 24)
        assert widths(it) == (80, 0)

    play(scenario, size=(80, 24))


def test_a_panel_that_was_closed_stays_closed_when_the_window_grows(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f3")
        assert widths(it)[1] > 0
        await it.press("f3")
        if widths(it)[1]:
            await it.press("f3")
        assert widths(it) == (100, 0)
        await it.pilot.resize_terminal(120, 40)
        assert widths(it) == (120, 0)

    play(scenario, size=(100, 30))


def test_every_f3_changes_the_width_of_the_panel(play) -> None:
    async def scenario(it: Driver) -> None:
        for width in (90, 98, 106, 120, 200, 320):
            await it.pilot.resize_terminal(width, 40)
            seen = [widths(it)[1]]
            for _ in range(4):
                await it.press("f3")
                seen.append(widths(it)[1])
            assert all(before != after for before, after in pairwise(seen))
            assert 0 in seen

    play(scenario, size=(90, 40), painted=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("width", "chat", "text"), [(120, 74, 69), (166, 120, 115), (171, 125, 120), (200, 125, 120), (320, 230, 120)]
)
def test_the_panel_gets_the_columns_that_the_text_does_not_need(play, width: int, chat: int, text: int) -> None:
    async def scenario(it: Driver) -> None:
        assert widths(it) == (chat, width - chat)
        assert it.transcript.look.width == text
        panel = it.app.screen.query_one("#panel")
        panel._dragging = True
        panel.on_mouse_move(_moved(panel, chat + 4))
        await it.until(lambda: widths(it)[0] == chat + 4)  # the edge is where the mouse is

    play(scenario, size=(width, 40))


def _moved(panel: Widget, column: int) -> events.MouseMove:
    place = {"x": 0, "y": 9, "delta_x": 0, "delta_y": 0, "button": 1, "shift": False, "meta": False, "ctrl": False}
    return events.MouseMove(panel, **place, screen_x=column, screen_y=9)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(40, 15), (80, 24), (120, 40), (200, 55)])
def test_a_notification_covers_no_text_and_moves_no_chart(play, size: tuple[int, int]) -> None:
    """It stands over the keys; a long one has its own lines between the input and the keys of the chat."""

    async def scenario(it: Driver) -> None:
        await it.ask("hi")
        panel = it.app.screen.query_one("#panel").region
        keys = it.app.screen.query_one(KeyBar).region
        prompt = it.prompt.region
        it.state.notify("a short notification")
        await it.until(lambda: "a short notification" in it.text())
        (toast,) = it.app.screen.query("Toast")
        assert keys.contains_region(toast.region)
        assert it.prompt.region == prompt
        it.state.notify("something happened to a file with a long name")
        rest = ", which is longer than a line of the chat" * (1 + size[0] // 80)
        it.state.notify(f"afterwards another thing happened{rest}")
        await it.until(lambda: "afterwards" in it.text())
        (toast,) = it.app.screen.query("Toast")
        assert it.prompt.region.bottom <= toast.region.y < toast.region.bottom <= keys.y
        assert it.app.screen.query_one("#panel").region == panel
        assert not toast.region.overlaps(panel)
        await it.press("f2")
        places = [section.region for section in it.app.screen.query(Section)]
        it.state.notify("a notification over the decode view")
        await it.until(lambda: "over the decode view" in it.text())
        (toast,) = it.app.screen.query("Toast")
        assert toast.region.height == 1
        assert it.app.screen.query_one(KeyBar).region.contains_region(toast.region)
        assert [section.region for section in it.app.screen.query(Section)] == places

    play(scenario, size=size)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["f4", "f5", "f6"])
def test_a_notification_covers_no_dialog(play, key: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(key)
        it.state.notify("one")
        it.state.notify("another")
        await it.until(lambda: "another" in it.text())
        (toast,) = it.app.screen.query("Toast")
        assert not any(toast.region.overlaps(box.region) for box in it.app.screen.query(".dialog"))

    play(scenario, size=(80, 24))


@pytest.mark.sampled
@pytest.mark.parametrize(("there", "back"), [("f2", "f2"), ("f4", "escape"), ("f6", "f6")])
def test_a_resize_on_another_screen_applies_to_the_chat(play, there: str, back: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(there)
        await it.pilot.resize_terminal(50, 40)
        await it.press(back)
        assert widths(it) == (50, 0)
        await it.press(there)
        await it.pilot.resize_terminal(120, 40)
        await it.press(back)
        assert widths(it) == (74, 46)
        assert "│ memory" in it.text()

    play(scenario)


def test_the_chat_keeps_its_minimum_width_under_a_dialog(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f4")
        await it.pilot.resize_terminal(96, 40)
        assert widths(it) == (60, 36)

    play(scenario)


def test_dragging_the_panel_stops_at_the_minimum_width_of_the_chat(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.pilot.resize_terminal(110, 40)
        await it.pilot.mouse_down("#panel", offset=(0, 3))
        await it.pilot.hover(offset=(5, 3))
        await it.pilot.mouse_up(offset=(5, 3))
        assert widths(it) == (60, 50)
        await it.pilot.resize_terminal(120, 40)
        assert widths(it) == (60, 60)

    play(scenario)


def test_a_section_draws_blank_lines_beyond_its_new_height(play) -> None:
    """The window was made smaller between the layout and the drawing."""

    async def scenario(it: Driver) -> None:
        section = it.app.poller.chat.query_one("#latency")  # type: ignore[union-attr]
        width, height = section.outer_size
        strips = section.render_lines(Region(0, 0, width, height + 3))
        assert [strip.cell_length for strip in strips] == [width] * (height + 3)

    play(scenario)


def test_the_decode_view_has_one_column_where_two_are_too_narrow(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        for width, height, columns in ((60, 24, 1), (75, 24, 1), (80, 24, 2), (120, 40, 2), (200, 55, 3)):
            await it.pilot.resize_terminal(width, height)
            await it.press("f2")
            sections = it.app.screen.query_one(Sections)
            regions = [section.region for section in sections.shown]
            assert len({region.x for region in regions}) == columns
            assert sum(region.area for region in regions) == sections.region.area, "a gap, or one over another"
            above = (MeterLines, LatencySection)
            taken = sum(it.app.screen.query_one(kind).region.height for kind in above)
            assert sections.region.height == height - 3 - taken
            await it.press("tab")
            await it.until(lambda: "answers" in it.text())
            await it.press("tab", "f2")

    play(scenario, size=(60, 20))


@pytest.mark.sampled(always=["f5"])
@pytest.mark.parametrize("key", ["f4", "f5", "f6", "f1"])
def test_a_dialog_is_as_tall_as_what_is_in_it(play, key: str) -> None:
    """The list of models has as many whole columns as fit."""

    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        for width, height, last in (
            (60, 20, "fits"),
            (80, 24, "context"),
            (120, 40, "licence"),
            (200, 50, "licence"),
        ):
            await it.pilot.resize_terminal(width, height)
            await it.press(key)
            await it.until(lambda: "reading the catalog" not in it.text())
            await it.pilot.pause()
            box = it.app.screen.query_one(".dialog")
            assert box.region.bottom <= height
            if key == "f4":
                assert box.region.height <= 11
            within = box.content_region
            used = max(child.region.bottom for child in box.children if child.display)
            assert within.bottom - used <= 1, "empty lines at the end"
            if key == "f5":
                await it.until(lambda: "qwen3-0.6b" in it.text())
                lines = it.text().split("\n")
                head = next(part for line in lines for part in line.split("│") if "memory" in part and "model" in part)
                assert head.split()[-1] == last
                assert "…" not in head
                assert "…" not in next(line for line in lines if "qwen3-0.6b" in line)
            await it.press("escape")
            assert not it.app.screen.query(".dialog")

    play(scenario, size=(60, 20))


def test_space_reserved_for_fast_text_is_given_up_in_a_smaller_window(play) -> None:
    engine = ScriptedEngine(pieces_per_poll=1).script(Script([f"one {n}\n\ntwo\n\nthree\n\n" for n in range(12)]))

    async def scenario(it: Driver) -> None:
        await it.ask("go")
        await it.pilot.resize_terminal(80, 14)
        await it.until(lambda: it.transcript.size.height < 12)
        *_, last, below = (row for row, _ in it.transcript._rows)
        assert "tokens" in last.plain
        assert not below.plain
        assert it.transcript.top + it.transcript.size.height == len(it.transcript._rows)

    play(scenario, engine)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(40, 15), (40, 12), (46, 20)])
def test_a_small_window_shows_the_whole_names(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.until(lambda: "F1  all keys" in it.text() or size[1] < 20)
        assert "scripted-1b" in it.text().splitlines()[0]
        assert "new text below" not in it.text()
        assert ("≈≈≈" in it.text()) == (size[1] >= 20)
        await it.press("f1")
        lines = [line.strip("│ ") for line in it.text().splitlines()]
        assert any(line.startswith("history (on the first,") for line in lines)

    play(scenario, size=size)
