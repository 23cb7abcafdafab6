"""Unsent text is kept with its session; the placeholder of a paste is one thing."""

import pytest
from textual import events
from textual.widgets.text_area import Selection

from headrace.app.sessions.records import Draft
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver

LONG = "word " * 1000
LABEL = "[pasted text 1: 1 line, 5,000 characters]"


async def reopen(it: Driver) -> None:
    it.state.open_session(it.state.store.find("last", drafts=True))
    await it.until(lambda: it.prompt.text, "the draft")


def test_unsent_text_is_restored_after_quitting(play) -> None:
    async def quit_with_a_draft(it: Driver) -> None:
        await it.press(*"read ")
        it.prompt.paste(LONG)
        await it.press("ctrl+q")
        assert it.state.conversation.session.draft

    async def resume(it: Driver) -> None:
        it.prompt.paste("other " * 1000)  # has the first number in this prompt
        it.prompt.put("")
        await reopen(it)
        assert it.prompt.text == "read [pasted text 2: 1 line, 5,000 characters]"
        assert it.prompt.whole_text == f"read {LONG}"
        await it.press("enter")
        await it.idle()
        assert it.said[0] == f"read {LONG}"
        await it.until(lambda: not it.state.conversation.session.draft, "kept no longer")

    play(quit_with_a_draft)
    play(resume)


def test_drafts_are_kept_per_session_and_move_to_a_new_one(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        first = it.state.conversation.session.id
        it.prompt.put("to the first")
        it.state.open_session(it.state.store.rename(it.state.store.create().id, "second"))
        await it.until(lambda: it.prompt.text == "")
        second = it.state.conversation.session.id
        it.prompt.put("to the second")
        it.state.open_session(it.state.store.session(first))
        await it.until(lambda: it.prompt.text == "to the first")
        await it.press("ctrl+n")
        assert it.prompt.text == "to the first"
        store = it.state.store
        assert [store.session(name).draft.text for name in (first, second)] == ["", "to the second"]
        assert [entry.title for entry in store.sessions()][1] == "second"

    play(scenario)


def test_queued_messages_and_an_edit_are_part_of_the_draft(play) -> None:
    async def scenario(it: Driver) -> None:
        it.engine.script(Script(), Script(hold=3))
        await it.ask("one")
        it.prompt.put("draft")
        await it.press("ctrl+up", "up", "e")
        assert it.state.unsent() == Draft("draft")
        await it.press(*"!")
        assert it.state.unsent() == Draft("draft\n\none!")
        await it.press("escape")
        await it.write("two")
        await it.write("three")
        it.prompt.put("four")
        assert it.state.unsent() == Draft("three\n\nfour")

    play(scenario, ScriptedEngine())


def test_text_is_kept_in_a_pause_of_typing(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press(*"hello")
        store = it.state.store
        session = it.state.conversation.session.id
        await it.until(lambda: store.session(session).draft.text == "hello")

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("column", "keys", "left"),
    [
        (5 + len(LABEL), ["backspace"], "read  it"),
        (5 + len(LABEL), ["ctrl+w"], "read  it"),
        (5, ["delete"], "read  it"),
        (9, ["ctrl+u"], " it"),
        (9, ["x", "y"], f"read {LABEL}xy it"),
        (3, ["backspace"], f"red {LABEL} it"),
    ],
)
def test_a_placeholder_is_deleted_and_restored_whole(play, column: int, keys: list[str], left: str) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.type("read ")
        it.prompt.paste(LONG)
        it.prompt.type(" it")
        it.prompt.selection = Selection.cursor((0, column))
        await it.press(*keys)
        assert it.prompt.text == left
        await it.press("ctrl+underscore")
        assert LABEL in it.prompt.text
        assert LONG in it.prompt.whole_text

    play(scenario)


def test_a_selection_of_a_part_takes_the_whole_placeholder(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.type("read ")
        it.prompt.paste(LONG)
        it.prompt.selection = Selection((0, 2), (0, 12))
        await it.press("x")
        assert it.prompt.text == "rex"

    play(scenario)


def test_pasted_text_returns_to_its_placeholder_after_the_editor(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.post_message(events.Paste(LONG))
        await it.until(lambda: it.prompt.text == LABEL)
        it.prompt.put_edited(f"before\n{LONG}")
        assert it.prompt.text == f"before\n{LABEL}"

    play(scenario)


def test_a_placeholder_within_a_paste_is_text() -> None:
    assert Draft("a b", {"a": "[b]", "b": "[a]"}).whole == "[b] [a]"
