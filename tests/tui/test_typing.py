"""Keys that come at once, as from a fast typist on a slow machine or line: none is lost, none overtakes another."""

import asyncio
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input
from textual.widgets.text_area import Selection

from headrace.app.config.settings import ChatSettings, Settings
from headrace.app.tui.screens import prompt_prefetch
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from tests.support.scripted_engine import ScriptedEngine
from tests.tui.conftest import Driver

KEYS = {"\r": "enter", "\b": "backspace", "\n": "ctrl+j", "\t": "tab", "←": "left", "↖": "home", "↘": "end"}


def key(character: str) -> events.Key:
    name = KEYS.get(character)
    return events.Key(name, None) if name else events.Key(character, character)


async def type_at_once(it: Driver, text: str) -> None:
    """All keys before the app has handled the first."""
    for character in text:
        it.app.post_message(key(character))
    await it.pilot.pause()
    await it.pilot.pause()


def test_editing_keys_in_a_burst_act_in_order(play) -> None:
    async def scenario(it: Driver) -> None:
        await type_at_once(it, "abc\bd←e\nfg↖X↘Y")
        assert it.prompt.text == "abe\nXfgdY"

    play(scenario)


JOINED = (
    "می\u200cخواهم",
    "క్\u200dష",
    "👨\u200d👩\u200d👧 and ❤\ufe0f\u200d🔥",
    "1\ufe0f\u20e3",
    "葛\U000e0100",
    "two\nlines: 👨\u200d👩",
)


def test_joiners_and_variation_selectors_are_text(play) -> None:
    async def scenario(it: Driver) -> None:
        for turn, text in enumerate(JOINED):
            await type_at_once(it, text)
            assert it.prompt.text == text
            assert it.prompt.cursor_location == it.prompt.document.end
            await type_at_once(it, "\r")
            await it.idle()
            assert it.said[2 * turn] == text

    play(scenario)


def test_control_and_lone_joining_characters_are_not_inserted(play) -> None:
    async def scenario(it: Driver) -> None:
        for character in "\u200c\u200d\ufe0f\u202e\u2066\u2028\x1b\x9b":
            it.prompt.put("")
            await type_at_once(it, f"{character}a{character}b")
            assert it.prompt.text == "ab"

    play(scenario)


def test_a_joiner_is_inserted_at_the_cursor_and_can_be_undone(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.put("first\nمیxyخواهم\nlast")
        it.prompt.selection = Selection((1, 4), (1, 2))  # made from right to left
        await type_at_once(it, "\u200c")
        assert it.prompt.text == "first\nمی\u200cخواهم\nlast"
        assert it.prompt.cursor_location == (1, 3)
        it.prompt.undo()
        assert it.prompt.text == "first\nمیxyخواهم\nlast"

    play(scenario)


def test_single_line_inputs_accept_joiners(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f4")
        field = it.app.screen.query_one(Input)
        await type_at_once(it, "\u200dمی\u200cخواهم a\u200db")
        assert field.value == "می\u200cخواهم ab"

    play(scenario)


def test_keys_of_a_burst_keep_their_order_on_other_screens(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f4")
        await type_at_once(it, "abc\bd")
        assert it.app.screen.query_one(Input).value == "abd"

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["", "/", "/exp", "/export", "/export a"])
def test_a_burst_runs_the_command_typed_not_the_one_highlighted(play, home: Path, first: str) -> None:
    """Whatever the menu shows when the rest and Enter come at once."""

    async def scenario(it: Driver) -> None:
        await it.ask("keep this")
        (home / "a").mkdir()
        before = set(home.rglob("*"))
        await type_at_once(it, first)
        await type_at_once(it, "/export a/talk.json\r".removeprefix(first))
        await it.until(lambda: "wrote" in it.text())
        assert it.prompt.text == ""
        assert {path for path in set(home.rglob("*")) - before if path.is_file()} == {home / "a" / "talk.json"}

    play(scenario)


def test_tab_completes_the_text_typed_so_far(play) -> None:
    async def scenario(it: Driver) -> None:
        await type_at_once(it, "/st\r")
        assert isinstance(it.app.screen, DecodeScreen)
        await it.press("escape")
        await type_at_once(it, "/exp\tx.md")
        assert it.prompt.text == "/export x.md"

    play(scenario)


def test_text_typed_after_enter_stays_in_the_input(play) -> None:
    async def scenario(it: Driver) -> None:
        await type_at_once(it, "first\rsecond")
        await it.idle()
        assert it.said[0] == "first"
        assert it.prompt.text == "second"

    play(scenario)


def test_refused_text_returns_before_newer_text(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.until(lambda: it.state.engine.state == "failed")
        await type_at_once(it, "hello \rworld")
        assert it.prompt.text == "hello world"

    play(scenario, ScriptedEngine(load_failure="not enough memory"), ready=False)


def test_letters_right_after_leaving_a_screen_go_to_the_input(play) -> None:
    async def scenario(it: Driver) -> None:
        for there, back in (("f2", "f2"), ("f1", "escape"), ("f4", "escape"), ("f6", "f6")):
            it.prompt.put("")
            await it.press(there)
            assert not isinstance(it.app.screen, ChatScreen)
            it.app.post_message(events.Key(back, None))
            await type_at_once(it, "quick")
            assert isinstance(it.app.screen, ChatScreen)
            assert it.prompt.text == "quick"

    play(scenario)


def test_the_panel_is_current_after_another_screen(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("go")
        await it.press("f2")
        await it.idle()
        it.app.poller.draw_metrics()
        await it.press("f2")
        await it.until(lambda: "│ speed  167 tok/s" in it.text())

    play(scenario)


def test_metrics_may_come_while_the_decode_view_is_being_made(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("go")
        it.app.action_decode_view()
        it.app.action_freeze()
        await it.until(lambda: "frozen" in it.text())

    play(scenario)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefetch, "_PAUSE_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_a_pause_in_typing_starts_a_prefetch(play) -> None:
    def last(it: Driver) -> list[str]:
        return [message["content"] for message in it.engine.ahead[-1].messages] if it.engine.ahead else []

    async def scenario(it: Driver) -> None:
        it.prompt.put("half a quest")
        await it.until(lambda: last(it) == ["half a quest"])
        await it.press("i", "o", "n")
        await it.until(lambda: last(it) == ["half a question"])
        await it.press("enter")
        await it.idle()
        await it.until(lambda: len(last(it)) == 2, "the answer itself")
        it.prompt.put("/set temperature 1")
        await it.press("ctrl+end")
        it.prompt.put("//etc is a folder")
        await it.until(lambda: last(it)[2:] == ["/etc is a folder"])
        assert not any("temperature" in text for ahead in it.engine.ahead for text in ahead.messages[-1].values())
        await it.write("/edit")
        read = len(it.engine.ahead)
        await it.press("x")
        await asyncio.sleep(0.1)
        assert len(it.engine.ahead) == read  # it would cost the branch that shows its place in the cache

    play(scenario)


@pytest.mark.usefixtures("quick")
def test_prefetch_can_be_turned_off(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.put("half a quest")
        await it.until(lambda: it.engine.ahead, "its tokens are counted")
        await asyncio.sleep(0.1)
        assert all(command.count_only for command in it.engine.ahead)

    play(scenario, settings=Settings(chat=ChatSettings(read_ahead=False)))
