"""Messages sent while an answer is written wait for its end; an editor, a history of all sessions, two Ctrl+C."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.app.chat.commands import matching
from headrace.app.chat.message_queue import MessageQueue
from headrace.app.sessions.store import SessionStore
from headrace.app.tui.input.editor import edit_text
from headrace.runtime.errors import UsageError
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


def test_a_message_sent_during_an_answer_is_queued(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("one")
        await it.until(lambda: it.state.conversation.phase == "answering")
        await it.write("two")
        await it.write("three")
        assert it.prompt.text == ""
        assert "⧗ two" in it.text()
        assert it.said[0] == "one"
        it.engine.release()
        await it.until(lambda: len(it.said) == 6)
        await it.idle()
        assert it.said == ["one", "first", "two", "second", "three", "third"]
        assert "⧗" not in it.text()

    play(scenario, ScriptedEngine().script(Script(["fir", "st"], hold=1), Script(["second"]), Script(["third"])))


def test_the_hint_below_queued_messages_is_cut_to_one_line(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("one")
        await it.until(lambda: it.state.conversation.phase == "answering")
        await it.write("two")
        lines = it.text().splitlines()
        hint = next(n for n, line in enumerate(lines) if "sent after this answer" in line)
        assert lines[hint].rstrip(" ▐").endswith("…")
        assert "╭─" in lines[hint + 1]
        await it.pilot.resize_terminal(80, 20)
        await it.until(lambda: "sent after this answer; /queue edits them" in it.text())

    play(scenario, ScriptedEngine().script(Script(["fir", "st"], hold=1)), size=(40, 20))


@pytest.mark.sampled
@pytest.mark.parametrize("end", ["stop", "die", "another session"])
def test_queued_messages_return_to_the_input_if_the_answer_is_stopped(play, end: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("one")
        await it.until(lambda: it.state.conversation.phase == "answering")
        await it.write("two")
        await it.write("three")
        await it.press(*"draft")
        if end == "stop":
            await it.press("escape")
        elif end == "die":
            it.engine.die()
        else:
            await it.press("ctrl+n")
        await it.until(lambda: it.prompt.text == "two\n\nthree\n\ndraft")
        assert "⧗" not in it.text()

    play(scenario, ScriptedEngine().script(Script(["fir", "st"], hold=1)))


def test_queued_messages_can_be_taken_back(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/queue")
        assert "no message is queued" in it.text()
        await it.write("one")
        await it.until(lambda: it.state.conversation.phase == "answering")
        await it.write("two @missing.txt")
        assert it.prompt.text == "two @missing.txt"  # refused at once
        await it.write("two")
        await it.write("/queue")
        assert it.prompt.text == "two"
        it.engine.release()
        await it.idle()
        assert it.said == ["one", "first"]

    play(scenario, ScriptedEngine().script(Script(["fir", "st"], hold=1)))


def test_an_empty_queue_does_not_block_sending(play) -> None:
    async def scenario(it: Driver) -> None:
        assert MessageQueue().send_next(it.state.conversation)

    play(scenario)


def test_ctrl_c_twice_quits(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("ctrl+c", "ctrl+c")
        await it.until(lambda: it.app._exit)

    play(scenario)


def test_up_finds_what_was_asked_in_other_sessions(play, home: Path) -> None:
    store = SessionStore(home / "sessions.db")
    for text in ("older", "newer", "older", "x" * 5000):
        store.add(store.create().id, None, "user", text)
    store.close()

    async def scenario(it: Driver) -> None:
        await it.ask("mine")
        seen = []
        for _ in range(4):
            await it.press("up")
            seen.append(it.prompt.text)
        assert seen == ["mine", "older", "newer", "newer"]

    play(scenario)


def test_undo_brings_back_what_was_deleted(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.type("some words")
        await it.press("ctrl+u")
        assert it.prompt.text == ""
        await it.press("ctrl+underscore")
        assert it.prompt.text == "some words"

    play(scenario)


def editor(home: Path, script: str) -> str:
    file = home / "my editor.py"
    file.write_text(f"import sys\nname = sys.argv[-1]\n{script}\n")
    return f"{sys.executable} '{file}' --wait"


def test_the_users_editor_changes_the_text(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "false")
    monkeypatch.setenv("VISUAL", editor(home, "old = open(name).read(); open(name, 'w').write(old.upper() + '\\n')"))
    assert edit_text("grüße\n\n") == "GRÜSSE\n\n"


@pytest.mark.parametrize("command", ["false", "no-such-editor-here", "'unclosed"])
def test_an_editor_that_fails_is_reported(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", command)
    with pytest.raises(UsageError, match=r"exit code 1|No such file|invalid command line"):
        edit_text("text")


def test_the_text_that_a_killed_editor_saved_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setenv("VISUAL", editor(home, kill))
    with pytest.raises(UsageError, match="SIGKILL") as error:
        edit_text("text")
    assert "unchanged" in (error.value.hint or "")
    monkeypatch.setenv("VISUAL", editor(home, f"open(name, 'a').write(' and more')\n{kill}"))
    with pytest.raises(UsageError, match="SIGKILL") as error:
        edit_text("text")
    kept = Path((error.value.hint or "").split()[-1])
    assert kept.read_text() == "text and more"
    kept.unlink()


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["false", "no-such-editor-here", "'unclosed"])
def test_a_failing_editor_restores_the_terminal_and_the_draft(
    play, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", command)
    resumed = []

    @contextmanager
    def suspend() -> Iterator[None]:
        yield
        resumed.append(True)  # not after an exception, as in textual

    async def scenario(it: Driver) -> None:
        monkeypatch.setattr(it.app, "suspend", suspend)
        await it.press(*"a draft", "f9")
        assert (resumed, it.prompt.text) == ([True], "a draft")
        assert command.strip("'") in it.text()

    play(scenario)


def test_f9_edits_what_stands_in_the_input(play, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", editor(home, "open(name, 'a').write(' and more\\n')"))

    async def scenario(it: Driver) -> None:
        await it.press(*"a draft", "f9")
        await it.until(lambda: "no editor can be opened here" in it.text())  # without a terminal
        assert it.prompt.text == "a draft"
        monkeypatch.setattr(it.app, "suspend", contextmanager(lambda: iter([None])))
        await it.press("f9")
        assert it.prompt.text == "a draft and more"

    play(scenario)


def test_a_complete_command_name_is_the_first_match() -> None:
    assert [command.name for command in matching("edit")] == ["edit", "editor"]
    assert matching("set")[0].name == "set"
