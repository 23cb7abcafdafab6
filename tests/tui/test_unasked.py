"""A dialog that opens by itself takes no key of someone who types; it offers what can work."""

from collections.abc import Awaitable, Callable

import pytest
from textual import events
from textual.widgets import OptionList

from headrace.app.engine.events import ContextFull
from headrace.app.tui.screens import dialogs
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.dialogs import UnaskedChoice
from tests.support.scripted_engine import Script
from tests.tui.conftest import Driver

ANSWERS = (("drop", "d", "leave out"), ("new", "n", "new session"))


@pytest.fixture
def asked(play) -> Callable[[Callable[[Driver, list[str | None]], Awaitable[None]]], None]:
    """Run a scenario over an open choice."""

    def run(then: Callable[[Driver, list[str | None]], Awaitable[None]]) -> None:
        async def scenario(it: Driver) -> None:
            told: list[str | None] = []
            it.prompt.put("what about ")
            it.app.push_screen(UnaskedChoice("full", "?", ANSWERS, it.prompt), told.append)
            await it.pilot.pause()
            await then(it, told)

        play(scenario)

    return run


def test_first_keys_after_a_question_are_text(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogs, "_QUIET_S", 1000.0)

    async def then(it: Driver, told: list[str | None]) -> None:
        await it.press(*"n", "space", *"d", "enter")
        it.app.post_message(events.Paste("pasted"))
        await it.until(lambda: it.prompt.text == "what about n dpasted")
        assert (told, it.said) == ([], [])
        await it.press("escape")
        assert told == [None]
        await it.press(*"!")
        assert it.prompt.text == "what about n dpasted!"

    asked(then)


def test_a_key_restarts_the_pause_before_a_question_takes_keys(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogs, "_QUIET_S", 1.0)

    async def then(it: Driver, told: list[str | None]) -> None:
        answers = it.app.screen.query_one(OptionList)
        await it.pilot.pause(0.6)
        await it.press("x")
        await it.pilot.pause(0.6)
        assert not answers.has_focus
        await it.pilot.pause(0.6)
        assert answers.has_focus
        assert (it.prompt.text, told) == ("what about x", [])

    asked(then)


def test_letters_of_a_burst_go_to_the_input_not_to_the_question(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogs, "_BURST_S", 1000.0)

    async def then(it: Driver, told: list[str | None]) -> None:
        await it.until(lambda: it.app.screen.query_one(OptionList).has_focus)
        await it.press(*"now")
        assert (it.prompt.text, told) == ("what about now", [])

    asked(then)


@pytest.mark.sampled
@pytest.mark.parametrize(("keys", "told_by"), [(["n"], "new"), (["enter"], "drop"), (["down", "enter"], "new")])
def test_keys_answer_a_question_after_typing_has_paused(asked, keys: list[str], told_by: str) -> None:
    async def then(it: Driver, told: list[str | None]) -> None:
        await it.until(lambda: it.app.screen.query_one(OptionList).has_focus)
        await it.press(*keys)
        await it.until(lambda: told == [told_by])
        assert it.prompt.text == "what about "

    asked(then)


def test_a_message_too_long_alone_returns_to_the_input(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        it.engine.script(Script(hold=4))
        await it.write("much too long")
        it.engine._backlog.append(ContextFull(it.engine.commands[-1].id, 900, 512, last_turn_fits=False))
        await it.until(lambda: it.prompt.text, "given back")
        assert it.prompt.text == "much too long"
        assert isinstance(it.app.screen, ChatScreen)
        assert "this message alone does not fit" in (it.state.conversation.notice or "")
        assert it.said == ["first", "Hello, world."]

    play(scenario)


def test_a_question_that_was_left_is_not_asked_again_after_a_refused_command(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        it.engine.script(Script(full=True))
        await it.write("second")
        await it.until(lambda: isinstance(it.app.screen, UnaskedChoice))
        await it.press("escape")
        await it.write("/frobnicate")
        it.app.poller.tick()
        await it.pilot.pause()
        assert "/frobnicate: unknown command" in it.text()
        assert isinstance(it.app.screen, ChatScreen)

    play(scenario)


def test_a_failed_summary_is_not_offered_again(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        it.engine.script(Script(full=True), Script(full=True))
        await it.write("second")
        await it.until(lambda: "summarise" in it.text())
        await it.until(lambda: it.app.screen.query_one(OptionList).has_focus)
        await it.press("s")
        await it.until(lambda: "too long to be summarised" in (it.state.conversation.notice or ""))
        await it.until(lambda: isinstance(it.app.screen, UnaskedChoice))
        assert "summarise the oldest" not in it.text()
        await it.until(lambda: it.app.screen.query_one(OptionList).has_focus)
        await it.press("n")
        await it.until(lambda: it.said == ["second", "Hello, world."])
        assert any("F4 has the one before" in toast.message for toast in it.app._notifications)

    play(scenario)
