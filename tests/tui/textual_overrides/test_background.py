"""The terminal's answer to OSC 11: no key however it is cut, and a theme that nobody chose follows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events

from headrace.app.config.settings import ScreenSettings, Settings
from headrace.app.tui.textual_overrides.background import BackgroundColour, BackgroundReply
from headrace.app.tui.textual_overrides.paste import PasteParser
from tests.tui.conftest import Driver

LIGHT = "\x1b]11;rgb:f7f7/f9f9/fafa\x07"
DARK = "\x1b]11;rgb:0e/14/1a\x1b\\"


def _read(reads: list[str]) -> tuple[list[str], list[bool], list[str]]:
    """Keys, grounds and pastes of what was read in these pieces."""
    answer = BackgroundReply()
    answer.awaited = True
    parser = PasteParser(ground=answer)
    found = [message for read in reads if read for message in parser.feed(read)]
    found += parser.tick()
    keys = [message.key for message in found if isinstance(message, events.Key)]
    grounds = [message.light for message in found if isinstance(message, BackgroundColour)]
    return keys, grounds, [message.text for message in found if isinstance(message, events.Paste)]


@given(st.sampled_from([LIGHT, DARK]), st.integers(2, 40))
def test_the_background_reply_is_never_read_as_keys(answer: str, cut: int) -> None:
    cut = min(cut, len(answer))
    keys, grounds, _ = _read(["a" + answer[:cut], answer[cut:] + "b"])
    assert keys == ["a", "b"]
    assert grounds == [answer is LIGHT]


def test_a_pasted_background_reply_is_text() -> None:
    keys, grounds, pastes = _read([f"\x1b[200~{LIGHT}\x1b[201~", DARK])
    assert pastes == [LIGHT]
    assert grounds == [False]
    assert keys == []


def test_one_reply_to_the_colour_query_is_awaited_and_a_partial_one_becomes_keys() -> None:
    assert _read([LIGHT, "x"])[0] == ["x"]
    assert BackgroundReply().take(LIGHT) == (LIGHT, None)
    answer = BackgroundReply()
    answer.awaited = True
    assert answer.take("\x1b]1") == ("", None)
    assert answer.give_up() == "\x1b]1"


@pytest.mark.parametrize(("chosen", "then"), [("", "headrace-light"), ("headrace-dark", "headrace-dark")])
def test_the_default_theme_follows_the_background(play, chosen: str, then: str) -> None:
    async def scenario(it: Driver) -> None:
        assert it.app.theme == "headrace-dark"
        it.app.post_message(BackgroundColour(light=True))
        await it.pilot.pause()
        assert it.app.theme == then
        it.app.post_message(BackgroundColour(light=False))
        await it.pilot.pause()
        assert it.app.theme == "headrace-dark"

    play(scenario, settings=Settings(screen=ScreenSettings(theme=chosen)))
