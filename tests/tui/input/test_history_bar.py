"""Searching the history of the prompt with Ctrl+R, and the key that answers again."""

import pytest

from headrace.app.tui.input.search_bars import HistoryBar
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


async def typed_before(it: Driver) -> None:
    for text in ("why is the sky blue?", "/set temperature 1", "what is a mill?", "Why is\nthe sea salt?"):
        await it.ask(text)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(40, 15), (80, 24), (120, 40)])
def test_the_history_is_searched_from_the_newest_entry(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await typed_before(it)
        asked = len(it.engine.commands)
        await it.press(*"draft", "ctrl+r")
        await it.until(lambda: "1 of 4" in it.text())
        await it.press(*"why_is".replace("_", " "))
        await it.until(lambda: "1 of 2" in it.text())
        assert "Why is the sea salt?" in it.text()
        assert it.prompt.text == "draft"
        await it.press("ctrl+r")
        await it.until(lambda: "2 of 2" in it.text())
        await it.press("ctrl+r")
        await it.until(lambda: "2 of 2" in it.text())
        await it.press("down")
        await it.until(lambda: "1 of 2" in it.text())
        await it.press("up", "enter")
        await it.until(lambda: it.prompt.text == "why is the sky blue?")
        assert it.prompt.has_focus
        assert not it.app.screen.query_one(HistoryBar).display
        assert len(it.engine.commands) == asked, "taken, not sent"
        await it.press("down", "down", "down", "down", "down")
        assert it.prompt.text == "draft", "after the newest entry"

    play(scenario, size=size)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["escape", "ctrl+c", "ctrl+g"])
def test_a_search_that_is_left_changes_nothing(play, key: str) -> None:
    async def scenario(it: Driver) -> None:
        await typed_before(it)
        said = it.said
        await it.press(*"draft", "ctrl+r", *"zzz")
        await it.until(lambda: "not found" in it.text())
        await it.press("enter")
        assert it.app.screen.query_one(HistoryBar).display
        await it.press(key, *"ed")
        assert it.prompt.text == "drafted"
        assert it.said == said
        assert "not found" not in it.text()

    play(scenario)


def test_an_empty_history_is_named(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("ctrl+r")
        assert "the history is empty" in it.text()
        assert it.prompt.has_focus

    play(scenario)


def test_ctrl_r_searches_the_history_and_ctrl_b_regenerates(play) -> None:
    engine = ScriptedEngine().script(Script(["first"]), Script(["second"]))

    async def scenario(it: Driver) -> None:
        await it.ask("again?")
        await it.press("ctrl+r", "escape")
        await it.idle()
        assert it.said == ["again?", "first"]
        await it.press("ctrl+b")
        await it.until(lambda: it.said == ["again?", "second"])
        await it.idle()
        assert "‹2/2›" in it.text()
        await it.write("/branch")
        assert it.said == ["again?", "first"]

    play(scenario, engine)
