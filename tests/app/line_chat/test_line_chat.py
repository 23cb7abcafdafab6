"""The line chat over a scripted engine: messages, commands, questions, failures."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.app.chat.conversation import Conversation
from headrace.app.engine.client import EngineState
from headrace.app.engine.events import LoadProgress
from headrace.app.line_chat import chat as line_chat
from headrace.app.line_chat.chat import LineChat
from headrace.app.line_chat.terminal import LineTerminal
from headrace.app.output.progress import StageProgress
from headrace.app.sessions.records import Draft
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import FullDiskError
from tests.support.scripted_engine import Script, ScriptedEngine


class ScriptedLines(LineTerminal):
    """Lines typed one after the other, then the end of the input. printed: all output."""

    def __init__(self, *typed: str | BaseException) -> None:
        super().__init__()
        self.typed = list(typed)
        self.printed = ""
        self.interrupt_when: Callable[[], bool] = lambda: False

    def read(self, prompt: str) -> str:
        self.printed += prompt
        line = self.typed.pop(0) if self.typed else EOFError()
        if isinstance(line, BaseException):
            raise line
        self.printed += f"{line}\n"
        return line

    def write(self, text: str) -> None:
        self.printed += text

    def interrupted(self) -> bool:
        return self.interrupt_when()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(line_chat, "_POLL_S", 0)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path / "sessions.db")
    yield store
    store.close()


def chatted(
    store: SessionStore, *typed: str | BaseException, engine: ScriptedEngine | None = None, session: str | None = None
) -> tuple[str, LineChat]:
    """Return what was printed, and the chat after its end."""
    lines = ScriptedLines(*typed)
    opened = store.session(session) if session else None
    chat = LineChat(Conversation(engine or ScriptedEngine(), store, opened), lines)
    chat.run()
    return lines.printed, chat


def contents(chat: LineChat) -> list[str]:
    return [message.content for message in chat.conversation.messages]


def test_an_answer_is_appended_with_its_figures(store: SessionStore) -> None:
    printed, chat = chatted(store, "Hi")
    assert "> Hi\nHello, world.\n(4 tokens, 167 tok/s, TTFT 50.0 ms, MBU 31 %)\n> \n" in printed
    assert not set(printed) & {"\r", "\x1b", "\b"}
    assert contents(chat) == ["Hi", "Hello, world."]
    chat.close()
    assert chat.conversation.engine.state == "stopped"


def test_model_text_cannot_drive_the_terminal(store: SessionStore) -> None:
    printed, _ = chatted(store, "Hi", engine=ScriptedEngine().script(Script(["a\x1b[2", "Jb\r", "c"])))
    assert not set(printed) & {"\r", "\x1b"}


def test_an_interrupt_stops_the_answer_and_continue_extends_it(store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(["one ", "two ", "three"], hold=1), Script(["three"]))
    lines = ScriptedLines("count", "/continue")
    chat = LineChat(Conversation(engine, store), lines)
    lines.interrupt_when = lambda: lines.printed.endswith("two ")
    chat.run()
    assert "one two \n(2 tokens, 167 tok/s, TTFT 50.0 ms, MBU 31 %, stopped)\n" in lines.printed
    assert "> /continue\nthree\n(" in lines.printed  # only what is new
    assert contents(chat) == ["count", "one two three"]


def test_a_repeating_answer_is_reported_on_a_separate_line(store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(["round ", "and ", "round"], repeats=True))
    engine.pieces_per_poll = 4  # up to the report
    printed, _ = chatted(store, "go", engine=engine)
    line = "(the answer has repeated itself for 500 tokens; larger models do this less; Ctrl-C stops it)"
    assert f"> go\nround \n{line}\nand round\n" in printed


def test_a_slow_first_pass_is_told_every_ten_seconds(store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(first_pass=(2.0, 2.5, 9.9, 10.4, 10.9)))
    engine.release()
    printed, _ = chatted(store, "Hi", engine=engine)
    reason = "MLX compiles its kernels, once per machine and MLX version"
    lines = f"> Hi\n(first pass, 2 s: {reason})\n(first pass, 10 s: {reason})\nHello, world.\n(4 tokens"
    assert lines in printed


@pytest.mark.parametrize("shown", [False, True])
def test_thinking_is_printed_if_asked_for(shown: bool, store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(["<th", "ink>\nhm, ", "well\n</thi", "nk>\n\nYes", "."]))
    printed, _ = chatted(store, *(["/think"] if shown else []), "Hi", engine=engine)
    assert f"> Hi\n(thinking)\n{'hm, well' + chr(10) if shown else ''}(answer)\nYes.\n(" in printed


@pytest.mark.parametrize("more", [["Yes."], ["<think>too</think>", "Yes."]])
def test_an_answer_cut_within_its_thinking_goes_on(more: list[str], store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(["<think>", "hm, ", "well"], hold=1), Script(more))
    lines = ScriptedLines("Hi", "/continue")
    chat = LineChat(Conversation(engine, store), lines)
    lines.interrupt_when = lambda: len(engine.commands) == 1 and "hm" in contents(chat)[-1]
    chat.run()
    assert lines.printed.count("(thinking)") == 1
    assert "> /continue\n(answer)\nYes.\n(" in lines.printed


def test_an_answer_that_another_process_deleted_is_reported(store: SessionStore, tmp_path: Path) -> None:
    engine = ScriptedEngine().script(Script(), Script(["one ", "two ", "three"]))
    lines = ScriptedLines("Hi", "count")
    chat = LineChat(Conversation(engine, store), lines)

    def delete_once() -> bool:
        if lines.printed.endswith("two "):
            other = SessionStore(tmp_path / "sessions.db")
            other.remove(chat.conversation.messages[2])
            other.close()
        return False

    lines.interrupt_when = delete_once
    chat.run()
    assert contents(chat) == ["Hi", "Hello, world."]
    assert "> count\none two" in lines.printed
    assert "deleted elsewhere" in lines.printed
    assert lines.printed.count("Hello, world.") == 1


class Drawn(StageProgress):
    """A line of progress that is drawn or not."""

    is_drawn = False

    def __call__(self, _stage: str, _done: int, _total: int | None, /) -> None:
        self.is_drawn = True

    def clear(self) -> None:
        self.is_drawn = False


def test_no_text_is_printed_while_a_progress_line_is_drawn(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn()
    monkeypatch.setattr(line_chat, "stage_progress", lambda: drawn)
    engine = ScriptedEngine()

    class AloneLines(ScriptedLines):
        def write(self, text: str) -> None:
            assert not drawn.is_drawn
            super().write(text)

        def read(self, prompt: str) -> str:
            line = super().read(prompt)
            if line == "again":
                engine.die()
                engine._backlog.insert(0, LoadProgress("loading weights", 0, None))
            return line

    lines = AloneLines("Hi", "again")

    def never() -> bool:
        assert not (drawn.is_drawn and engine.state == "ready"), "it would stand through the prefill"
        return False

    lines.interrupt_when = never
    chat = LineChat(Conversation(engine, store), lines)
    chat.run()
    assert "killed (SIGKILL)" in lines.printed
    assert contents(chat)[-1] == "Hello, world."


def test_the_line_chat_waits_only_for_loads_that_a_line_started(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "_load", list)  # no event: the model goes on loading
    lines = ScriptedLines("/help", "", "/restart")
    # The first answer of each line is for a Ctrl-C from before it.
    answers = iter([False, False, True, *([False] * 4), False, False, True])
    lines.interrupt_when = lambda: next(answers)
    LineChat(Conversation(engine, store), lines).run()
    assert "/quit: quit" in lines.printed
    assert list(answers) == []
    assert engine.state == "loading"


def test_commands_have_the_names_of_other_programs(store: SessionStore) -> None:
    printed, _ = chatted(store, "/?", "/undo", "/bye", "never sent")
    assert "/quit: quit; also /exit, /bye, /q" in printed
    assert "/undo: unknown command" in printed
    assert "/delete removes the last message" in printed
    assert "never sent" not in printed


def test_two_interrupts_at_the_prompt_end_the_chat(store: SessionStore) -> None:
    printed, chat = chatted(store, KeyboardInterrupt(), KeyboardInterrupt(), "never sent")
    assert "Ctrl-C again quits" in printed
    assert contents(chat) == []


def test_sessions_are_stored_and_resumed(store: SessionStore) -> None:
    _, first = chatted(store, "Who turns the wheel?")
    first.close()
    found = first.conversation.session.id
    store.set_draft(found, Draft("half a question"))
    engine = ScriptedEngine()
    printed, chat = chatted(store, "And now?", engine=engine, session=found)
    assert "> Who turns the wheel?\nHello, world.\n" in printed
    assert "typed before and not sent:\nhalf a question\n" in printed
    assert [message["content"] for message in engine.commands[-1].messages] == [*contents(chat)[:2], "And now?"]


def test_every_slash_command_of_the_line_chat_answers(store: SessionStore, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("the note")
    engine = ScriptedEngine()
    printed, chat = chatted(
        store,
        *(
            "/set temperature 0.2",
            "/set",
            "/system Be brief.",
            "/file note.txt",
            "Hi",
            "/regen",
            "/branch",
            "/rename Mill",
        ),
        *(
            "/export chat.md",
            "/preset save mine",
            "/preset",
            "/new",
            "/nonsense",
            "/tree",
            "/sessions",
            "/search world",
        ),
        *("/rename", "/help", "/set temperature hot", "//help"),
        engine=engine,
    )
    first = engine.commands[0]
    assert first.options.temperature == 0.2
    assert first.messages[0] == {"role": "system", "content": "Be brief."}
    assert "the note" in first.messages[1]["content"]
    assert "temperature: 0.2 (" in printed
    assert (tmp_path / "chat.md").read_text().count("Hello, world.") == 1
    assert "presets: mine" in printed
    assert [entry.session.title for entry in store.sessions(2)][-1] == "Mill"
    assert "/nonsense: unknown command" in printed
    assert "/tree needs the chat on a full screen (/help lists the others)" in printed
    assert "/sessions needs the chat on a full screen (outside of the chat, `headrace sessions list` lists" in printed
    assert "/search needs the chat on a full screen (outside of the chat, `headrace sessions search WORDS`" in printed
    assert "/rename TITLE" in printed
    assert "/regen: " in printed
    assert "/tree: " not in printed
    assert "temperature must be" in printed
    assert contents(chat) == ["/help", "Hello, world."]  # of the new session


def test_a_message_is_edited_and_removed(store: SessionStore) -> None:
    _, chat = chatted(store, "first", "/edit", "second", "/edit", "", "/delete", "maybe", "y")
    assert contents(chat) == ["second"]
    assert len(store.messages(chat.conversation.session.id)) == 3


def test_an_edited_answer_goes_on_without_its_typed_text(store: SessionStore) -> None:
    printed, chat = chatted(store, "first", "/edit answer", "Once ", "/continue")
    assert "> Once \n> /continue\nHello, world.\n(" in printed
    assert contents(chat) == ["first", "Once Hello, world."]


@pytest.mark.parametrize("line", ["/edit second", "/branch there", "/summary new"])
def test_unknown_arguments_of_commands_are_refused(line: str, store: SessionStore) -> None:
    printed, chat = chatted(store, "first", line)
    assert f"{line.partition(' ')[0]} [" in printed
    assert contents(chat) == ["first", "Hello, world."]


def test_a_full_context_is_asked_about(store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(), Script(full=True), Script(["short"]), Script(full=True))
    printed, chat = chatted(store, "one", "two", "x", "d", "three", KeyboardInterrupt(), engine=engine)
    assert "d: leave out the oldest turns\n" in printed
    assert engine.commands[2].drop_oldest
    assert contents(chat) == ["one", "Hello, world.", "two", "short", "three"]


def test_a_question_left_open_is_asked_again_after_an_answer_and_a_load(store: SessionStore) -> None:
    full = Script(full=True)
    leave = KeyboardInterrupt()
    typed = "one", "two", leave, "/think", "", "three", leave, "/restart", leave
    printed, _ = chatted(store, *typed, engine=ScriptedEngine().script(Script(), full, full))
    assert printed.count("The context is full.") == 3
    assert "> /think\nthinking is printed\n> \n> three\nThe context is full." in printed
    assert "> /restart\nThe context is full." in printed


def test_a_summary_is_shown_changed_and_undone(store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(), Script(full=True), Script(["in short"]), Script(["then"]))
    printed, chat = chatted(
        store, "/summary", "one", "two", "s", "/summary", "shorter", "three", "/summary undo", "/summary undo", "four",
        engine=engine,
    )  # fmt: skip
    assert "> /summary\nall messages are sent: there is no summary\n" in printed
    assert "> /summary\nin short\nType the new text; an empty line leaves it.\n> shorter\n" in printed
    assert "> /summary undo\n2 messages are left out\n> /summary undo\nall messages are sent again\n" in printed
    assert "shorter" in str(engine.commands[-2].messages)
    assert [message["content"] for message in engine.commands[-1].messages] == contents(chat)[:-1]


@pytest.mark.parametrize("state", ["ready", "failed"])
def test_turns_are_summarised_if_the_engine_runs(state: EngineState, store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(), Script(full=True), Script(["in short"]), Script(["then"]))

    class Lines(ScriptedLines):
        def read(self, prompt: str) -> str:
            line = super().read(prompt)
            if line == "s":
                engine.state = state
            return line

    lines = Lines("one", "two", "s")
    chat = LineChat(Conversation(engine, store), lines)
    chat.run()
    runs = state == "ready"
    assert ("(summarising the oldest turns)\nthen\n(" in lines.printed) == runs
    assert ("summarising" in lines.printed.partition("? s\n")[2]) == runs
    assert ("the engine is not running" in lines.printed) != runs
    assert chat.conversation.session.summary == ("in short" if runs else "")


def test_an_engine_that_died_at_a_question_is_started_for_the_choice(store: SessionStore) -> None:
    engine = ScriptedEngine().script(Script(), Script(full=True), Script(["short"]))

    class DyingLines(ScriptedLines):
        def read(self, prompt: str) -> str:
            line = super().read(prompt)
            if line == "d":
                engine.die()
            return line

    lines = DyingLines("one", "two", "d")
    chat = LineChat(Conversation(engine, store), lines)
    chat.run()
    assert contents(chat) == ["one", "Hello, world.", "two", "short"]
    assert lines.printed.count("killed (SIGKILL)") == 1


def test_a_new_session_after_a_full_context_is_reported(store: SessionStore) -> None:
    full = Script(["long"], reason="length", context_full=True)
    printed, chat = chatted(store, "one", "two", "n", engine=ScriptedEngine().script(Script(), full))
    assert "? n\na new session\n> " in printed
    assert contents(chat) == []


@pytest.mark.parametrize(
    ("choices", "questions", "answered"),
    [
        (["d"], ["context"], True),  # the answer is stored: the disk has room
        ([KeyboardInterrupt(), "u"], ["context", "disk"], False),
        ([KeyboardInterrupt(), "t"], ["context", "disk"], False),
        (["x", "d", "more"], ["context"], True),
    ],
)
def test_a_full_context_and_a_full_disk_are_asked_about_once(
    choices: list[str | BaseException], questions: list[str], answered: bool, store: SessionStore
) -> None:
    engine = ScriptedEngine().script(Script(), Script(full=True), Script(["short"]))
    lines = ScriptedLines("one", "two", *choices)
    chat = LineChat(Conversation(engine, store), lines)

    def fill() -> bool:
        store.db.full = store.db.full or (len(engine.commands) == 2 and chat.conversation.phase != "idle")
        return False

    lines.interrupt_when = fill
    chat.run()
    assert re.findall(r"The (context|disk) is full\.", lines.printed) == questions
    assert ("short" in contents(chat)) == answered


def test_a_full_disk_that_refuses_a_choice_is_asked_about(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Conversation, _choice: str) -> None:
        self.store.db.full = True
        raise FullDiskError("no room")

    monkeypatch.setattr(Conversation, "resolve", refuse)
    engine = ScriptedEngine().script(Script(), Script(full=True))
    printed, _ = chatted(store, "one", "two", "d", "u", engine=engine)
    assert "? d\nno room\nThe disk is full. " in printed
    assert store.unsaved is not None


def test_the_line_chat_survives_a_dead_engine_and_a_failed_model(store: SessionStore) -> None:
    engine = ScriptedEngine()
    lines = ScriptedLines("Hi", "again")
    chat = LineChat(Conversation(engine, store), lines)
    engine.script(Script(["one", "two"], hold=1))

    def die_once() -> bool:
        if lines.printed.endswith("one"):
            engine.die()
        return False

    lines.interrupt_when = die_once
    chat.run()
    assert "killed (SIGKILL)" in lines.printed
    assert "the next message starts it again" in lines.printed
    assert contents(chat)[-1] == "Hello, world."
    failing = ScriptedEngine(load_failure="no such weights")
    printed, _ = chatted(store, engine=failing)
    assert "no such weights; /restart tries again, /model NAME takes another model\n" in printed


def test_a_servers_model_is_kept_without_a_question(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineTerminal, "agreed", lambda *_: pytest.fail("asked"))
    for name in ("smollm2-135m", "no-such-model"):
        printed, chat = chatted(store, f"/model {name}", engine=ScriptedEngine(is_remote=True))
        assert "a server's model stays" in printed
        assert chat.conversation.session.model is None
    engine = ScriptedEngine(is_remote=True, load_failure="no answer")
    printed, _ = chatted(store, "/model", engine=engine)
    assert "no answer; /restart tries again\n" in printed
    assert "/model NAME" not in printed


def test_a_message_is_answered_though_the_engine_died_before_it_was_typed(store: SessionStore) -> None:
    engine = ScriptedEngine()

    class DyingLines(ScriptedLines):
        def read(self, prompt: str) -> str:
            line = super().read(prompt)
            if line == "again":
                engine.die()
            return line

    lines = DyingLines("Hi", "again")
    chat = LineChat(Conversation(engine, store), lines)
    chat.run()
    assert contents(chat) == ["Hi", "Hello, world.", "again", "Hello, world."]
    assert lines.printed.count("killed (SIGKILL)") == 1


@pytest.mark.parametrize("refused", ["begin_answer", "grow", "finish"])
def test_a_full_disk_offers_an_unsaved_session(
    refused: str, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = getattr(SessionStore, refused)

    def full(self: SessionStore, *arguments: object, **options: object) -> object:
        if self.unsaved is None:
            self.db.full = True
            raise FullDiskError("the disk is full")
        return write(self, *arguments, **options)

    monkeypatch.setattr(SessionStore, refused, full)
    printed, chat = chatted(store, "Hi", "u", "more")
    assert "u: go on; nothing more is saved\n" in printed
    assert contents(chat) == ["Hi", "Hello, world.", "more", "Hello, world."]
    answer = "\nHello, world.\n(4 tokens, 167 tok/s, TTFT 50.0 ms, MBU 31 %)\n"
    assert f"> Hi{answer}the disk is full\nThe disk is full." in printed
    assert f"> more{answer}" in printed
    assert printed.count(answer) == 2


def test_a_schema_applies_from_the_next_answer(store: SessionStore, tmp_path: Path) -> None:
    file = tmp_path / "book.json"
    file.write_text('{"type": "object", "properties": {"title": {"type": "string"}}}')
    engine = ScriptedEngine()
    printed, chat = chatted(
        store, "/schema", "/schema none.json", "/schema {\"not\": 1", f"/schema {file}", "/schema", "Why?",
        "/schema off", "Why?", "/schema object", "Why?", engine=engine,
    )  # fmt: skip
    assert "no schema" in printed
    assert "none.json" in printed
    assert '"title"' in printed
    schemas = [command.options.schema for command in engine.commands]
    assert schemas == [{"type": "object", "properties": {"title": {"type": "string"}}}, None, {"type": "object"}]
    assert chat.conversation.session.sampling == {"schema": '{"type": "object"}'}
    assert store.session(chat.conversation.session.id).sampling == {"schema": '{"type": "object"}'}


def test_a_message_may_have_several_lines(store: SessionStore) -> None:
    printed, chat = chatted(store, "one\\", "two", '"""three', "", 'four"""')
    assert contents(chat)[::2] == ["one\ntwo", "three\n\nfour"]
    assert "> one\\\n. two\n" in printed


@pytest.mark.parametrize(
    ("typed", "value"),
    [("stop a=b", ["a=b"]), ("stop=a=b", ["a=b"]), ("stop = a", ["a"]), ("stop a", ["a"])],
)
def test_set_splits_at_the_first_equals_sign_only(store: SessionStore, typed: str, value: list[str]) -> None:
    _, chat = chatted(store, f"/set {typed}")
    assert list(chat.conversation.session.sampling["stop"]) == value
