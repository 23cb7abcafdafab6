"""Written text is not lost, and nothing is written, sent or fetched without being asked for."""

from pathlib import Path

import pytest
from textual import events

from headrace.app.sessions.store import SessionStore
from headrace.app.tui.app import HeadraceApp
from headrace.app.tui.screens.dialogs import AskText, Choose
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


def test_ctrl_c_stores_a_draft_and_up_restores_it(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(*"a draft", "ctrl+c")
        assert it.prompt.text == ""
        assert "↑ brings it back" in it.text()
        await it.press("up")
        assert it.prompt.text == "a draft"
        await it.press("ctrl+c", "ctrl+c")
        assert "Ctrl+C again quits" in it.text()

    play(scenario)


def test_a_file_that_is_missing_is_refused_by_name_and_the_text_kept(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("what is in @missing.txt?")
        assert "missing.txt cannot be read" in it.text()
        assert "`@missing.txt`" in it.text()
        assert (it.prompt.text, it.said) == ("what is in @missing.txt?", [])
        await it.ask("what is `@missing.txt` and who is @user.name?")
        assert it.said[0].startswith("what is `@missing.txt`")

    play(scenario)


def test_an_answer_edited_by_hand_is_not_called_incomplete(play) -> None:
    engine = ScriptedEngine().script(Script(["The sky is green."]))

    async def scenario(it: Driver) -> None:
        await it.ask("sky?")
        await it.write("/edit answer")
        await it.write("The sky is blue.")
        await it.until(lambda: "The sky is blue." in it.text())
        assert "incomplete" not in it.text()
        assert "edited by hand" in it.text()

    play(scenario, engine)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["ctrl+e", "ctrl+o"])
def test_exporting_from_the_session_search_asks_for_the_file_first(play, home: Path, key: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("keep this")
        await it.press("f4", *"keep", key)
        assert list(home.glob("headrace-*")) == []
        await it.press("ctrl+s")
        assert isinstance(it.app.screen, AskText)
        assert list(home.glob("headrace-*")) == []
        await it.press("enter")
        await it.until(lambda: "keep this" in "".join(file.read_text() for file in home.glob("headrace-*.md")))

    play(scenario)


def test_the_model_picker_asks_before_a_download(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: "smollm2-135m" in it.text())
        await it.press("enter")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        assert "to download" in it.text()
        assert "free" in it.text()
        await it.press("escape")
        assert it.engine.pulls == []
        await it.press("enter")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        await it.press("y")
        await it.until(lambda: it.engine.pulls == ["smollm2-135m"])

    play(scenario)


def test_keys_before_the_first_frame_are_kept(play, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(app: HeadraceApp) -> None:  # by the terminal's thread, which does not wait for the screen
        for character in "early, ":
            app.post_message(events.Key(character, character))
        app.post_message(events.Paste("and late"))

    monkeypatch.setattr(HeadraceApp, "on_load", typed, raising=False)

    async def scenario(it: Driver) -> None:
        assert it.prompt.text == "early, and late"

    play(scenario)


def test_a_second_terminal_is_reported_and_flips_no_branch(play, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionStore, "hold", lambda *_: True)

    async def scenario(it: Driver) -> None:
        await it.ask("here")
        there = SessionStore(home / "sessions.db")
        there.add(it.state.conversation.session.id, None, "user", "said there")
        await it.ask("and here")
        assert it.said == ["here", "Hello, world.", "and here", "Hello, world."]
        assert "open in another terminal" in it.text()
        there.close()

    play(scenario)
