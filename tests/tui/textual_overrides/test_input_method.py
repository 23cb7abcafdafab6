"""The terminal's cursor stays at the caret, where input methods show what is being typed."""

from textual.geometry import Offset

from tests.tui.conftest import Driver


def shown_at(it: Driver, text: str) -> Offset:
    """Return the place behind the last row that ends with a text; wide characters take two columns."""
    rows = it.text().splitlines()
    row = max(number for number, line in enumerate(rows) if text in line)
    before = rows[row][: rows[row].rindex(text) + len(text)]
    wide = sum(ord(char) > 0x2E80 and ord(char) < 0xFF00 for char in before)
    return Offset(len(before) + wide, row)


def test_the_cursor_is_at_the_caret_after_any_resize(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(*"zzabc", "漢")
        for size in ((100, 40), (60, 20), (120, 30), (80, 24)):
            await it.pilot.resize_terminal(*size)
            await it.pilot.pause()
            assert it.app.cursor_position == shown_at(it, "zzabc漢")
        await it.press("left")
        assert it.app.cursor_position == shown_at(it, "zzabc")

    play(scenario)


def test_the_cursor_follows_a_prompt_that_shrinks(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(*"one", "ctrl+j", *"two", "ctrl+j", *"zzz")
        assert it.app.cursor_position == shown_at(it, "zzz")
        for _ in range(4):
            await it.press("backspace")
        assert it.app.cursor_position == shown_at(it, "two")

    play(scenario)


def test_the_cursor_follows_the_focus(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2")
        await it.pilot.pause()
        await it.press(*"qqxx")
        assert it.app.cursor_position == shown_at(it, "qqxx")
        await it.press("left", "left")
        assert it.app.cursor_position == shown_at(it, "qq")

    play(scenario)
