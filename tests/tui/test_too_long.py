"""A message that does not fit the context is refused, and what was typed is in the input again."""

from pathlib import Path

import pytest
from textual import events

from headrace.app.engine.events import PromptCounted
from headrace.app.tui.screens import prompt_prefetch
from tests.support.scripted_engine import Script
from tests.tui.conftest import Driver


def counted(it: Driver, tokens: int, longest: int = 448) -> None:
    """The engine has counted what stands in the input, ten tokens of the template aside."""
    it.engine._backlog.append(PromptCounted(it.engine.ahead[-1].id, tokens, longest, tokens - 10))


async def typed(it: Driver, text: str) -> None:
    before = len(it.engine.ahead)
    it.prompt.put(text)
    await it.until(lambda: it.engine.ahead[before:] and not it.engine.ahead[-1].count_only, "the pause in typing")


def test_a_refused_paste_returns_folded_before_newer_text(play) -> None:
    async def scenario(it: Driver) -> None:
        it.engine.script(Script(full=True))
        long = "word " * 2000
        it.prompt.post_message(events.Paste(long))
        await it.until(lambda: it.prompt.text)
        await it.press("enter", *"and")
        await it.until(lambda: it.prompt.text.endswith("]and"), "given back")
        assert it.prompt.text.startswith("[pasted text")
        assert it.prompt.whole_text == long + "and"

    play(scenario)


def test_the_tokens_of_what_is_typed_stand_below_it(play) -> None:
    async def scenario(it: Driver) -> None:
        await typed(it, "why?")
        counted(it, 31)
        await it.until(lambda: "21 of 438 tokens" in it.text())
        it.prompt.put("")
        await it.until(lambda: "of 438 tokens" not in it.text())

    play(scenario)


def test_the_token_count_of_an_earlier_text_is_not_shown(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await typed(it, "why?")
        counted(it, 31)
        await it.until(lambda: "21 of 438 tokens" in it.text())
        await it.write("/edit answer")
        assert it.prompt.text == "Hello, world."
        assert "of 438 tokens" not in it.text()
        await it.press("escape")
        await typed(it, "")
        it.engine._backlog.append(PromptCounted(it.engine.ahead[-1].id, 10, 448))  # of the conversation alone
        await it.pilot.pause(0.05)
        it.prompt.put("and?")
        await it.pilot.pause(0.05)
        assert "0 of 448 tokens" not in it.text()

    play(scenario)


def test_tokens_are_counted_while_keys_come_and_the_last_count_stays(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefetch, "_PAUSE_S", 1000.0)  # there never is one
    monkeypatch.setattr(prompt_prefetch, "_COUNT_S", 0.01)

    async def scenario(it: Driver) -> None:
        await it.press("h", "i")
        await it.until(lambda: it.engine.ahead)
        assert it.engine.ahead[-1].count_only
        counted(it, 31)
        await it.until(lambda: "21 of 438 tokens" in it.text())
        await it.press("!")
        await it.until(lambda: it.engine.ahead[-1].messages[-1]["content"] == "hi!")
        assert "21 of 438 tokens" in it.text()
        counted(it, 32)
        await it.until(lambda: "22 of 438 tokens" in it.text())

    play(scenario)


def test_a_message_known_to_be_too_long_is_not_sent(play) -> None:
    async def scenario(it: Driver) -> None:
        await typed(it, "a long story")
        counted(it, 900)
        await it.until(lambda: "too long" in it.text())
        await it.press("enter")
        assert it.prompt.text == "a long story"
        assert (it.said, it.engine.commands) == ([], [])
        assert any("shorten the message" in toast.message for toast in it.app._notifications)
        await typed(it, "short")
        counted(it, 20)
        await it.ask("short")
        assert it.said[0] == "short"

    play(scenario)


def test_a_message_longer_than_the_context_is_never_sent(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        await typed(it, "a long story")
        counted(it, 900)
        await it.until(lambda: "too long" in it.text())
        await it.press("enter")
        await it.until(lambda: any("shorten the message" in toast.message for toast in it.app._notifications))
        assert it.said == ["first", "Hello, world."]
        assert it.prompt.text == "a long story"

    play(scenario)


def test_a_full_context_is_not_called_a_long_message(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        await typed(it, "short")
        it.engine._backlog.append(PromptCounted(it.engine.ahead[-1].id, 900, 448, 3))
        await it.until(lambda: "the context is full" in it.text())
        assert "too long" not in it.text()

    play(scenario)


def test_a_folded_paste_states_its_lines_and_characters(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.paste("word " * 2000)
        assert it.prompt.text == "[pasted text 1: 1 line, 10,000 characters]"

    play(scenario)


def test_prefetched_text_is_not_counted_again(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefetch, "_PAUSE_S", 0.01)
    monkeypatch.setattr(prompt_prefetch, "_COUNT_S", 0.1)

    async def scenario(it: Driver) -> None:
        await typed(it, "why?")
        asked = len(it.engine.ahead)
        await it.pilot.pause(0.2)
        assert len(it.engine.ahead) == asked

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("turns", [0, 1])
def test_a_message_that_proves_too_long_returns_to_the_input(play, home: Path, turns: int) -> None:
    """Sent before it was counted; alone, or after the older turns were left out. The next message goes without it."""
    (home / "log.txt").write_text("many lines")

    async def scenario(it: Driver) -> None:
        for _ in range(turns):
            await it.ask("first")
        it.engine.script(*[Script(full=True)] * (turns + 1))
        await it.write("/file log.txt\nlook at it")
        if turns:
            await it.until(lambda: it.app.screen is not it.app.poller.chat, "the question what is to go")
            await it.press("d")
        await it.until(lambda: it.prompt.text, "given back")
        assert it.prompt.text == "/file log.txt\nlook at it"
        assert it.said == ["first", "Hello, world."][: 2 * turns]
        assert it.state.conversation.notice
        it.prompt.put("")
        await it.ask("short")
        assert [message["content"] for message in it.engine.commands[-1].messages][-1] == "short"

    play(scenario)
