"""Branches by mouse, help on the screen it is asked for, and the K/V kept on disk."""

import pytest

from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.help_screen import HelpScreen
from headrace.app.tui.screens.sessions_screen import SessionsScreen
from headrace.runtime.config.paths import kept_chats_dir
from tests.support.scripted_engine import Script
from tests.tui.conftest import Driver


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_a_click_on_the_count_of_branches_switches(play, size: tuple[int, int]) -> None:
    async def click(it: Driver, mark: str, at: int) -> None:
        lines = it.text().splitlines()
        row = next(number for number, line in enumerate(lines) if mark in line)
        await it.pilot.click(offset=(lines[row].index(mark) + at, row))
        await it.pilot.pause()

    async def scenario(it: Driver) -> None:
        it.engine.script(Script(["first"]), Script(["second"]))
        await it.ask("why?")
        await it.press("ctrl+b")
        await it.idle()
        await it.until(lambda: "‹2/2›" in it.text())
        await click(it, "‹2/2›", 0)
        await it.until(lambda: it.said == ["why?", "first"])
        await it.until(lambda: "‹1/2›" in it.text())
        await click(it, "‹1/2›", 2)
        await it.until(lambda: it.said == ["why?", "second"])
        await it.press(*"text")
        assert it.prompt.text == "text"

    play(scenario, size=size)


@pytest.mark.sampled
@pytest.mark.parametrize(("key", "description"), [("f4", "Resume"), ("f2", "Time all steps"), ("f6", "Save")])
def test_help_begins_with_the_keys_of_its_screen(play, key: str, description: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(key, "f1")
        assert isinstance(it.app.screen, HelpScreen)
        await it.until(lambda: "this screen" in it.text())
        assert description in it.text()
        await it.press("f1", "escape")
        assert isinstance(it.app.screen, ChatScreen)
        await it.press("f1")
        assert "this screen" not in it.text()

    play(scenario, size=(80, 24))


def test_the_kept_kv_is_counted_and_can_be_cleared(play) -> None:
    async def scenario(it: Driver) -> None:
        kept_chats_dir().mkdir(parents=True)
        (kept_chats_dir() / "block").write_bytes(bytes(3 << 20))
        await it.ask("why?")
        await it.press("f4")
        await it.until(lambda: "K/V kept on disk: 3.00 MiB" in it.text())
        await it.press("ctrl+k", "n")
        assert list(kept_chats_dir().iterdir())
        await it.press("ctrl+k", "y")
        assert isinstance(it.app.screen, SessionsScreen)
        await it.until(lambda: "K/V kept on disk: 0 B" in it.text())
        assert not list(kept_chats_dir().iterdir())

    play(scenario)
