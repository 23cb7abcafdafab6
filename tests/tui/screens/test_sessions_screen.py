"""The sessions screen: hits on other branches, and sessions that another headrace deletes meanwhile."""

import sqlite3
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from headrace.app.sessions.store import SessionStore
from headrace.app.tui.screens.dialogs import AskText, Choose
from headrace.app.tui.screens.sessions_screen import SessionsScreen
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


def delete_elsewhere(home: Path, session_id: str) -> None:
    """As another headrace would."""
    store = SessionStore(home / "sessions.db")
    store.delete(session_id)
    store.close()


def two_answers() -> ScriptedEngine:
    return ScriptedEngine().script(Script(["A waterwheel turns."])).script(Script(["A windmill turns."]))


def listed(it: Driver) -> OptionList:
    return it.app.screen.query_one("#sessions", OptionList)


def has_sessions(it: Driver) -> bool:
    """Return whether the sessions screen is open and lists sessions or hits."""
    return isinstance(it.app.screen, SessionsScreen) and listed(it).highlighted is not None


async def go_elsewhere(it: Driver) -> str:
    """Ask something, then begin a new session; the id of the old one."""
    await it.ask("mill")
    left = it.state.conversation.session.id
    await it.write("/new")
    return left


def test_opening_a_hit_in_another_session_switches_to_its_branch(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        await it.ask("/regen")
        first = it.state.conversation.session.id
        await it.write("/new")
        await it.write("/search waterwheel")
        await it.press("enter")
        assert it.state.conversation.session.id == first
        assert it.said == ["mill", "A waterwheel turns."]
        assert "A waterwheel turns." in it.text()

    play(scenario, two_answers())


def test_a_hit_on_another_branch_of_the_open_session_shows(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        await it.ask("/regen")
        await it.write("/search waterwheel")
        await it.press("enter")
        assert it.said == ["mill", "A waterwheel turns."]
        await it.ask("and on")
        assert it.said[:3] == ["mill", "A waterwheel turns.", "and on"]

    play(scenario, two_answers())


def test_opening_a_hit_on_the_shown_branch_keeps_the_branch(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        await it.ask("/regen")
        await it.write("/branch back")
        first = it.state.conversation.session.id
        await it.write("/search mill")
        await it.press("down", "enter")  # past the newer answer, to the question both branches share
        assert it.said == ["mill", "A waterwheel turns."]
        await it.write("/new")
        await it.write("/search mill")
        await it.press("down", "enter")
        assert it.state.conversation.session.id == first
        assert it.said == ["mill", "A waterwheel turns."]

    play(scenario, two_answers())


def test_opening_a_hit_in_another_session_does_not_stop_a_running_answer(play) -> None:
    engine = two_answers().script(Script(["on ", "and ", "on"], hold=2))

    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        await it.ask("/regen")
        await it.write("and?")
        await it.until(lambda: it.state.conversation.phase == "answering")
        await it.write("/search waterwheel")
        await it.press("enter")
        assert isinstance(it.app.screen, SessionsScreen)
        assert "Esc stops it" in it.text()
        assert it.state.conversation.phase == "answering"

    play(scenario, engine)


def test_a_hit_in_the_middle_of_a_long_answer_comes_into_view(play) -> None:
    long = "\n\n".join("The Waterwheel turns." if number == 70 else f"Line {number}." for number in range(140))

    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        await it.ask("and?")
        assert "Waterwheel" not in it.text()
        await it.write("/search waterwh")
        await it.press("enter")
        assert "The Waterwheel turns." in it.text()
        await it.write("/new")
        await it.write("/search waterwh")
        await it.press("enter")
        assert "The Waterwheel turns." in it.text()
        await it.ask("go on")
        assert it.said[-1] == "It does."

    play(scenario, ScriptedEngine().script(Script([long])).script(Script(["Yes."])).script(Script(["It does."])))


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["/sessions", "/search mill"])
def test_a_session_deleted_elsewhere_is_reported_and_leaves_the_list(play, home: Path, command: str) -> None:
    async def scenario(it: Driver) -> None:
        for key in ("enter", "ctrl+r", "ctrl+d", "ctrl+s"):
            deleted = await go_elsewhere(it)
            here = it.state.conversation.session.id
            await it.write(command)
            await it.until(lambda: has_sessions(it))
            delete_elsewhere(home, deleted)
            await it.press(key)
            await it.until(lambda deleted=deleted: f"there is no session {deleted}" in it.text())
            assert ("no sessions yet" if command == "/sessions" else "nothing found") in it.text()
            assert isinstance(it.app.screen, SessionsScreen)
            assert it.state.conversation.session.id == here
            await it.press("escape")
            await it.until(lambda: not isinstance(it.app.screen, SessionsScreen))

    play(scenario)


def test_the_open_session_deleted_elsewhere_is_reported(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        deleted = it.state.conversation.session.id
        await it.press("f4")
        delete_elsewhere(home, deleted)
        await it.press("enter")
        await it.until(lambda: f"there is no session {deleted}" in it.text())
        assert "no sessions yet" in it.text()

    play(scenario)


def test_a_question_in_a_deleted_session_is_reported(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        deleted = it.state.conversation.session.id
        delete_elsewhere(home, deleted)
        await it.write("and?")
        await it.until(lambda: any("deleted elsewhere" in toast.message for toast in it.app._notifications))
        assert it.prompt.text == "and?"
        await it.press("ctrl+n")
        assert it.state.conversation.session.id != deleted
        await it.ask("mill")
        assert it.said == ["mill", "Hello, world."]

    play(scenario)


def test_a_session_deleted_during_an_answer_is_reported(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("mill")
        await it.until(lambda: it.said[-1:] == ["Hello"])
        delete_elsewhere(home, it.state.conversation.session.id)
        it.engine.release()
        await it.idle()
        assert "deleted elsewhere" in " ".join(it.text().split())
        assert it.said[0] == "mill"
        await it.press("ctrl+n")
        await it.ask("mill")
        assert it.said == ["mill", "Hello, world."]

    play(scenario, ScriptedEngine().script(Script(["Hello", ", world"], hold=1)))


def test_renaming_a_session_deleted_elsewhere_is_reported(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        deleted = await go_elsewhere(it)
        await it.press("f4", "ctrl+r")
        assert isinstance(it.app.screen, AskText)
        delete_elsewhere(home, deleted)
        it.app.screen.query_one(Input).value = "Too late"
        await it.press("enter")
        await it.until(lambda: f"there is no session {deleted}" in it.text())
        assert "no sessions yet" in it.text()

    play(scenario)


def test_deleting_a_session_deleted_elsewhere_is_no_error(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        deleted = await go_elsewhere(it)
        await it.press("f4", "ctrl+d")
        assert isinstance(it.app.screen, Choose)
        delete_elsewhere(home, deleted)
        await it.press("y")
        assert isinstance(it.app.screen, SessionsScreen)
        assert "no sessions yet" in it.text()

    play(scenario)


def test_an_unreadable_store_is_reported_in_the_list(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        await go_elsewhere(it)
        other = sqlite3.connect(home / "sessions.db")
        other.execute("ALTER TABLE messages RENAME TO gone")
        try:
            await it.press("f4")
            for key in ("x", "enter"):
                assert "cannot be used: no such table" in str(listed(it).get_option_at_index(0).prompt)
                await it.press(key)
            await it.press("escape")
        finally:
            other.execute("ALTER TABLE gone RENAME TO messages")
            other.close()

    play(scenario)
