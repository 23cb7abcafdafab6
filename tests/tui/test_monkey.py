"""Random keys, pastes, clicks and sizes: none of them crashes the chat."""

import random

import pytest
from textual import events

from headrace.app.tui.screens.chat_screen import ChatScreen
from tests.support.scripted_engine import ScriptedEngine
from tests.tui.conftest import Driver

_FUNCTION_KEYS = [f"f{number}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]
_MOVES = ["up", "down", "left", "right", "home", "end", "pageup", "pagedown", "tab", "shift+tab", "ctrl+end"]
_EDITS = ["backspace", "delete", "ctrl+k", "ctrl+u", "ctrl+w", "ctrl+x", "ctrl+shift+k", "ctrl+a", "ctrl+j", "ctrl+y"]
_CONTROLS = [f"ctrl+{letter}" for letter in "pnoftrbledc"]
# Ctrl+Q and Ctrl+Z end or suspend; Ctrl+G opens an editor.
_KEYS = [*_FUNCTION_KEYS, *_MOVES, *_EDITS, *_CONTROLS, "enter", "enter", "enter", "escape", "escape", *"aqxyn/?@1 "]
_TEXTS = [
    "why?",
    "/again 2",
    "/compare",
    "/system",
    "/set temperature 1",
    "/find a",
    "/messages",
    "/branch",
    "/copy",
    "/export",
    "/new",
    "/sessions",
    "/model",
    "/?",
    "@",
    "line\n" * 40,
    "x" * 3000,
]
_SIZES = [(40, 15), (80, 24), (120, 40), (200, 55), (20, 6)]
_ACTIONS = 60
_NIGHTLY_SEEDS = [*range(1, 25), 5122]  # in 5122 a screen closes with a selection


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in _NIGHTLY_SEEDS)])
def test_random_input_crashes_nothing(play, seed: int) -> None:
    """The exception of a crash ends the scenario."""
    choose = random.Random(seed)
    done: list[str] = []

    async def act(it: Driver) -> None:
        kind = choose.random()
        if kind < 0.72:
            keys = [choose.choice(_KEYS)] * choose.choice([1, 1, 1, 4])
            done.append(" ".join(keys))
            await it.pilot.press(*keys)
        elif kind < 0.86:
            text = choose.choice(_TEXTS)
            done.append(f"paste {text[:20]!r}")
            it.app.post_message(events.Paste(text))
            if choose.random() < 0.7:
                await it.pilot.press("enter")
        elif kind < 0.93:
            size = choose.choice(_SIZES)
            done.append(f"size {size}")
            await it.pilot.resize_terminal(*size)
        else:
            width, height = it.app.size
            place = (choose.randrange(width), choose.randrange(height))
            done.append(f"click {place}")
            await it.pilot.click(offset=place, times=choose.choice([1, 2]))

    async def scenario(it: Driver) -> None:
        for _ in range(_ACTIONS):
            if not it.app.is_running:
                return  # a dialog that quits was answered
            try:
                await act(it)
            except Exception as error:
                error.add_note("after " + ", ".join(done[-12:]))
                raise
        assert it.app._exception is None

    play(scenario, ScriptedEngine(), size=choose.choice(_SIZES), painted=True)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["ctrl+k", "ctrl+x", "ctrl+shift+k"])
@pytest.mark.parametrize("sent", [True, False])
def test_a_line_is_deleted_after_a_long_paste(play, key: str, sent: bool) -> None:
    """The prompt is empty by then, and still knows the paste."""

    async def scenario(it: Driver) -> None:
        it.app.post_message(events.Paste("word " * 500))
        await it.until(lambda: it.prompt.text, "the paste stands in the input")
        if sent:
            await it.press("enter")
            await it.idle()
        else:
            await it.press("ctrl+a", "backspace")
        await it.press(key)
        await it.press("h", "i")
        assert "hi" in it.prompt.text

    play(scenario)


def test_the_last_line_is_deleted_after_a_long_paste(play) -> None:
    async def scenario(it: Driver) -> None:
        it.app.post_message(events.Paste("word " * 500))
        await it.until(lambda: it.prompt.text, "the paste stands in the input")
        await it.press("ctrl+j", "h", "i", "ctrl+x", "ctrl+x", "ctrl+x")
        assert it.app._exception is None

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [["f5", *["enter"] * 4], ["ctrl+p", *["enter"] * 5], ["f2", *["escape"] * 4]])
def test_impatient_keys_close_one_screen_only(play, keys: list[str]) -> None:
    async def scenario(it: Driver) -> None:
        for key in keys:  # without a pause: the first one's screen may be there when the last one comes
            await it.pilot.press(key)
        await it.pilot.pause()
        assert any(isinstance(screen, ChatScreen) for screen in it.app.screen_stack)

    play(scenario)
