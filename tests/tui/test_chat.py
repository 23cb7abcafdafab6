"""The chat, key by key and command by command, over a scripted engine."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual import events
from textual.widgets import Input, OptionList

from headrace.app.engine.events import PeakMeasured
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.search_bars import FindBar
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.screens.help_screen import HelpScreen
from headrace.app.tui.screens.models_screen import ModelsScreen
from headrace.app.tui.screens.parameters_screen import ParametersScreen
from tests.support.scripted_engine import CARD, PEAK, Script, ScriptedEngine, with_context
from tests.tui.conftest import Driver


def test_question_and_answer_are_on_the_screen(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("Who is there?")
        screen = it.text()
        assert "❯ Who is there?" in screen
        assert "Hello, world." in screen
        assert "4 tokens" in screen
        assert "167 tok/s" in screen
        assert "first token after 0.05 s" in screen
        assert "24 / 512" in screen  # context tokens of the limit

    play(scenario)


def test_the_seconds_of_a_slow_first_pass_are_shown_until_the_first_token(play) -> None:
    gpu = replace(CARD, machine=replace(CARD.machine, backend="cuda"))
    engine = ScriptedEngine(card_to_load=gpu).script(Script(first_pass=(2.0, 2.5, 3.0)))

    async def scenario(it: Driver) -> None:
        await it.write("Who is there?")
        await it.until(lambda: "first pass, 3 s: MLX compiles its kernels" in it.text())
        engine.release()
        await it.idle()
        assert "first pass" not in it.text()
        assert "Hello, world." in it.text()

    play(scenario, engine)


def test_typing_works_before_the_model_is_loaded(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("early")
        assert "❯ early" in it.text()
        await it.idle()
        assert it.said == ["early", "Hello, world."]

    play(scenario, ready=False)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_stop_keeps_the_partial_answer_and_continue_extends_it(play, key: str) -> None:
    engine = ScriptedEngine().script(Script(["one ", "two ", "three"], hold=1), Script(["three"]))

    async def scenario(it: Driver) -> None:
        await it.write("count")
        await it.until(lambda: it.said[-1] == "one two ")
        await it.press(key)
        await it.idle()
        assert it.state.conversation.messages[-1].partial
        assert "■ stopped" in it.text()
        await it.write("/continue")
        await it.idle()
        assert it.said == ["count", "one two three"]
        assert engine.commands[-1].begun.text == "one two "

    play(scenario, engine)


def test_regenerate_branches_and_branches_switch(play) -> None:
    engine = ScriptedEngine().script(Script(["first"]), Script(["second"]))

    async def scenario(it: Driver) -> None:
        await it.ask("again?")
        await it.press("ctrl+b")
        await it.until(lambda: it.said == ["again?", "second"])
        await it.idle()
        assert "‹2/2›" in it.text()
        await it.write("/branch")
        assert it.said[-1] == "first"
        await it.write("/branch back")
        assert it.said[-1] == "second"

    play(scenario, engine)


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [("ctrl+b",), ("ctrl+up", "r")])
def test_a_question_stopped_before_its_answer_is_asked_again(play, keys: tuple[str, ...]) -> None:
    engine = ScriptedEngine().script(Script(["hi"]), Script(hold=4), Script(["fine"]))

    async def scenario(it: Driver) -> None:
        await it.ask("Say hi")
        await it.write("How are you?")
        await it.press("escape")
        await it.idle()
        assert it.said == ["Say hi", "hi", "How are you?"]
        await it.press(*keys)
        await it.until(lambda: it.said == ["Say hi", "hi", "How are you?", "fine"])

    play(scenario, engine)


def test_edit_branches_and_escape_leaves_it(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What is up?")
        await it.write("/edit")
        assert it.prompt.text == "What is up?"
        assert "editing" in it.text()
        await it.until(lambda: "Esc Leave edit" in it.text())
        await it.press("escape")
        assert it.prompt.text == ""
        await it.until(lambda: "Esc" not in it.text())
        it.prompt.put("a draft")
        await it.press("ctrl+up", "up", "e")
        assert it.prompt.text == "What is up?"
        await it.press("escape")
        assert it.prompt.text == "a draft"
        it.prompt.put("")
        await it.write("/edit")
        await it.ask("What is down?")
        assert it.said[0] == "What is down?"
        assert it.state.conversation.branch.alternatives(it.state.conversation.messages[0].id).ids[0] != 0
        assert "‹2/2›" in it.text()

    play(scenario)


def test_an_answer_is_edited_and_continued(play) -> None:
    engine = ScriptedEngine().script(Script(["The sky is green."]), Script([" and deep."]))

    async def scenario(it: Driver) -> None:
        await it.ask("sky?")
        await it.write("/edit answer")
        await it.write("The sky is blue")
        assert it.said[-1] == "The sky is blue"
        await it.write("/continue")
        await it.until(lambda: it.said[-1] == "The sky is blue and deep.")

    play(scenario, engine)


def test_a_message_of_two_slashes_keeps_both_when_edited(play) -> None:
    engine = ScriptedEngine().script(Script(["// a comment"]))

    async def scenario(it: Driver) -> None:
        await it.ask("code")
        await it.write("/edit answer")
        await it.write("// another comment")
        assert it.said[-1] == "// another comment"
        await it.write("/edit")
        await it.ask("//x")
        assert it.said[0] == "//x"
        await it.ask("//y")
        assert it.said[2] == "/y"

    play(scenario, engine)


def test_keys_copy_and_regenerate_a_selected_message(play) -> None:
    engine = ScriptedEngine().script(Script(["```python\nprint(1)\n```"]), Script(["other"]))

    async def scenario(it: Driver) -> None:
        await it.ask("code")
        await it.press("ctrl+up")
        assert it.transcript.has_focus
        await it.press("b")
        assert it.app.clipboard == "print(1)\n"
        await it.press("c")
        assert it.app.clipboard.startswith("```python")
        await it.press("up", "c")
        assert it.app.clipboard == "code"
        await it.press("down", "r")
        await it.until(lambda: it.said[-1] == "other")
        await it.idle()
        await it.press("left_square_bracket")
        assert "print(1)" in it.said[-1]
        await it.press("right_square_bracket")
        assert it.said[-1] == "other"
        await it.press("up", "e")
        assert it.prompt.text == "code"
        assert it.prompt.has_focus

    play(scenario, engine)


def test_an_answer_or_one_of_its_code_blocks_is_copied(play) -> None:
    engine = ScriptedEngine().script(Script(["say\n\n```\na\n```\n\n```\nb\n```"]))

    async def scenario(it: Driver) -> None:
        await it.write("/copy")
        assert "there is no answer yet" in it.text()
        await it.ask("x")
        await it.write("/copy code")
        await it.press("2")
        assert it.app.clipboard == "b\n"
        await it.press("ctrl+o")
        assert it.app.clipboard.startswith("say")

    play(scenario, engine)


def test_a_new_session_begins_and_the_old_one_is_resumed(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("the first session")
        first = it.state.conversation.session.id
        await it.write("/new")
        assert it.state.conversation.session.id != first
        assert "commands" in it.text()
        await it.press("f4")
        assert "the first session" in it.text()
        await it.press("enter")
        assert it.state.conversation.session.id == first
        assert "Hello, world." in it.text()

    play(scenario)


def test_search_finds_words_in_other_sessions(play) -> None:
    engine = ScriptedEngine().script(Script(["A waterwheel turns."]))

    async def scenario(it: Driver) -> None:
        await it.ask("mill")
        first = it.state.conversation.session.id
        await it.write("/new")
        await it.write("/search waterwheel")
        assert "«waterwheel»" in it.text()
        await it.press("enter")
        assert it.state.conversation.session.id == first

    play(scenario, engine)


def test_rename_and_delete_sessions(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("old name")
        await it.write("/rename A better name")
        assert it.state.conversation.session.title == "A better name"
        await it.press("f4", "ctrl+d")
        assert "this session is open" in it.text()
        await it.press("escape")
        await it.write("/new")
        await it.press("f4", "ctrl+r")
        it.app.screen.query_one(Input).value = "Renamed"
        await it.press("enter")
        assert "Renamed" in it.text()
        await it.press("ctrl+d", "y")
        await it.until(lambda: not it.state.store.sessions())
        assert "no sessions yet" in it.text()

    play(scenario)


def test_export_as_markdown_and_json(play, home: Path) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("keep this")
        await it.write("/export talk.md")
        await it.write("/export talk.json")
        assert "keep this" in (home / "talk.md").read_text()
        assert json.loads((home / "talk.json").read_text())["messages"][0]["content"] == "keep this"
        await it.write("/export talk.md/below/a/file.md")
        await it.until(lambda: "cannot be written" in it.text())
        it.app.clear_notifications()
        await it.write("/export new/talk.md")
        await it.until(lambda: any("is no folder" in toast.message for toast in it.app._notifications))
        assert not (home / "new").exists()

    play(scenario)


def test_an_export_overwrites_nothing(play, home: Path) -> None:
    (home / "my talk.md").write_text("mine")

    async def scenario(it: Driver) -> None:
        await it.ask("keep this")
        for name in ('"my talk.md"', "my talk.md", "."):
            await it.write(f"/export {name}")
            await it.until(lambda: any("exists already" in toast.message for toast in it.app._notifications))
            it.app.clear_notifications()
        assert (home / "my talk.md").read_text() == "mine"
        await it.write('/export "other talk.md"')
        assert "keep this" in (home / "other talk.md").read_text()
        await it.write("/export")
        await it.ask("and this")
        await it.write("/export")
        assert "and this" in (home / f"headrace-{it.state.conversation.session.id}.md").read_text()

    play(scenario)


def test_parameters_set_by_commands_reach_the_engine(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/set temperature 0.7")
        await it.write("/system Be brief.")
        await it.ask("x")
        assert it.engine.commands[-1].options.given() == {"temperature": 0.7}
        assert it.engine.commands[-1].messages[0] == {"role": "system", "content": "Be brief."}
        await it.write("/set thinking off")
        await it.ask("y")
        assert it.engine.commands[-1].options.thinking is False
        await it.write("/set thinking auto")
        await it.ask("z")
        assert it.engine.commands[-1].options.thinking is None
        await it.write("/set top_p 3")
        assert "top_p must be above 0" in it.text()
        await it.write("/set warmth 3")
        assert "no parameter called 'warmth'" in it.text()
        await it.write("/schema object")
        await it.ask("o")
        assert it.engine.commands[-1].options.schema == {"type": "object"}
        await it.write('/schema {"$ref": "other.json"}')
        assert "$ref 'other.json'" in it.text()

    play(scenario)


def test_the_parameters_screen_saves_all_values_or_none(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f6")
        it.app.screen.query_one("#temperature", Input).value = "0.5"
        it.app.screen.query_one("#seed", Input).value = "many"
        await it.press("ctrl+s")
        await it.until(lambda: "✗ seed must be" in it.text())
        it.app.screen.query_one("#temperature", Input).focus()
        await it.until(lambda: "✗ seed must be" not in it.text())
        it.app.screen.query_one("#seed", Input).focus()  # whenever focus comes, it does not hide why
        await it.until(lambda: "✗ seed must be" in it.text())
        assert it.state.conversation.session.sampling == {}
        it.app.screen.query_one("#seed", Input).value = "7"
        await it.press("ctrl+s")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        assert it.state.conversation.session.sampling == {"temperature": 0.5, "seed": 7}

    play(scenario)


def test_function_keys_open_help_and_the_decode_view(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("x")
        await it.press("f1")
        assert isinstance(it.app.screen, HelpScreen)
        assert "/regen" in it.text()
        assert "Shift+Enter" in it.text()
        await it.press("escape", "f2")
        assert isinstance(it.app.screen, DecodeScreen)
        assert "roofline" in it.text()
        assert "1 of" not in it.text()
        await it.press("space", *"xqabc")  # letters go to the line
        assert it.state.frozen is None
        assert isinstance(it.app.screen, DecodeScreen)
        await it.press(*["backspace"] * 6)  # in an empty line, arrows are of the steps
        await it.press("f7")
        assert it.state.frozen is not None
        await it.until(lambda: "frozen" in it.text())
        await it.press("left")
        assert "step 3" in it.text()
        assert "context" in it.text()
        await it.press("left")
        assert "step 2" in it.text()
        await it.press("f7", "f2")
        assert it.state.frozen is None
        assert isinstance(it.app.screen, ChatScreen)
        await it.write("/stats")
        assert isinstance(it.app.screen, DecodeScreen)

    play(scenario)


def test_quit_ends_the_engine(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/quit")
        await it.until(lambda: it.engine.state == "stopped")

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["quit", "new", "regen", "help"])
def test_a_command_without_arguments_refuses_text(play, name: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        session = it.state.conversation.session.id
        await it.write(f"/{name} smoking: give me tips")
        assert f"/{name} takes no argument" in it.text()
        assert it.prompt.text == ""
        await it.press("up")
        assert it.prompt.text == f"/{name} smoking: give me tips"
        assert (it.state.conversation.session.id, len(it.engine.commands)) == (session, 1)
        assert it.engine.state == "ready"
        await it.ask(f"//{name} smoking: give me tips")
        assert it.said[2] == f"/{name} smoking: give me tips"

    play(scenario)


def test_an_unknown_command_is_named_and_joins_no_other(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/frobnicate now")
        assert "/frobnicate: unknown command" in it.text()
        await it.press(*"/find", "enter")
        assert it.transcript.screen.query_one(FindBar).display
        await it.press("escape", "up", "up")
        assert it.prompt.text == "/frobnicate now"

    play(scenario)


def test_a_refused_message_stays_in_the_prompt(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("what is in @missing/ and why")
        assert "missing/ cannot be read" in it.text()
        assert it.prompt.text == "what is in @missing/ and why"
        assert not it.said

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/?", HelpScreen),
        ("/models", ModelsScreen),
        ("/settings", ParametersScreen),
    ],
)
def test_commands_have_the_names_of_other_programs(play, typed: str, expected: type) -> None:
    async def scenario(it: Driver) -> None:
        await it.write(typed)
        assert isinstance(it.app.screen, expected)
        assert not it.said

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("typed", ["/exit", "/bye", "/q"])
def test_each_quitting_command_stops_the_engine(play, typed: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.write(typed)
        await it.until(lambda: it.engine.state == "stopped")

    play(scenario)


def test_a_conversation_is_cleared_and_answered_again_by_other_names(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("first")
        await it.ask("/retry")
        assert it.state.conversation.branch.alternatives(it.state.conversation.messages[-1].id).ids
        assert len(it.engine.commands) == 2
        session = it.state.conversation.session.id
        await it.write("/clear")
        assert not it.said
        assert it.state.conversation.session.id != session

    play(scenario)


def test_a_completed_command_is_carried_out_by_enter(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("slash", "s", "t")
        menu = it.app.screen.query_one(CompletionMenu)
        assert menu.display
        assert "/stats" in it.text()
        await it.press("enter")
        assert isinstance(it.app.screen, DecodeScreen)

    play(scenario)


def test_menu_moves_closes_and_fills_in(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("slash", "e")
        await it.press("down", "down", "tab")  # /edit, /editor, /export: the third
        assert it.prompt.text == "/export "
        it.prompt.put("")
        await it.press("slash")
        menu = it.app.screen.query_one(CompletionMenu)
        assert menu.virtual_size.height == menu.option_count  # also beside the panel an entry is a line
        await it.press("escape")
        assert not menu.display
        assert it.state.conversation.messages == []

    play(scenario)


def test_paths_complete_and_files_are_attached(play, home: Path) -> None:
    (home / "notes.txt").write_text("the mill stands")

    async def scenario(it: Driver) -> None:
        for key in "read @no":
            await it.press(key if key not in " @" else {" ": "space", "@": "at"}[key])
        await it.press("tab")
        assert it.prompt.text == "read @notes.txt "
        await it.press("enter")
        await it.idle()
        assert "the mill stands" in it.engine.commands[-1].messages[-1]["content"]
        assert "+ notes.txt" in it.text()

    play(scenario)


def test_the_file_command_waits_for_the_message(play, home: Path) -> None:
    (home / "my notes.txt").write_text("the mill stands")

    async def scenario(it: Driver) -> None:
        await it.write("/file my notes.txt")
        assert it.prompt.text == "/file my notes.txt\n"
        assert not it.app.screen.query_one(CompletionMenu).is_open
        assert it.said == []
        await it.press("w", "h", "y", "enter")
        await it.idle()
        assert it.said[0] == "why"
        assert "the mill stands" in it.engine.commands[-1].messages[-1]["content"]
        await it.write("/file my notes.txt")
        await it.press("enter")  # alone
        await it.idle()
        assert it.state.conversation.messages[2].attachments[0].text == "the mill stands"

    play(scenario)


def test_a_file_that_cannot_be_attached_is_reported(play) -> None:
    async def scenario(it: Driver) -> None:
        for path in ("missing.txt", "/dev/null", "~nobody-has-this-name/x", ""):
            it.app.clear_notifications()
            await it.write(f"/file {path}")
            assert it.prompt.text == ""
            assert any(toast.severity == "error" for toast in it.app._notifications)
            assert it.said == []

    play(scenario)


def test_enter_after_a_complete_path_sends_the_message(play, home: Path) -> None:
    (home / "notes.txt").write_text("the mill stands")

    async def scenario(it: Driver) -> None:
        it.prompt.put("read @notes.txt")
        await it.press("enter")
        await it.idle()
        assert it.said[0] == "read @notes.txt"

    play(scenario)


def test_a_notification_does_not_cover_the_input(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("ctrl+c")
        await it.until(lambda: "quits" in it.text())
        (toast,) = it.app.screen.query("Toast")
        assert not toast.region.overlaps(it.prompt.region)

    play(scenario, size=(80, 24))


def test_a_missing_file_is_reported_and_the_text_kept(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("look at @./missing.txt")
        assert "./missing.txt cannot be read" in it.text()
        assert it.prompt.text == "look at @./missing.txt"

    play(scenario)


def test_the_input_takes_several_lines_and_recalls_history(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("a", "ctrl+j", "b")
        assert it.prompt.text == "a\nb"
        await it.press("enter")
        await it.idle()
        assert it.said[0] == "a\nb"
        await it.ask("second")
        await it.press("up")
        assert it.prompt.text == "second"
        await it.press("up")
        assert it.prompt.text == "a\nb"
        await it.press("down", "down")
        assert it.prompt.text == ""
        it.prompt.put("\n".join("0123456789abcdef"))
        await it.pilot.pause()
        assert it.prompt.size.height == 10

    play(scenario)


def test_an_export_that_cannot_be_written_is_reported(play) -> None:
    async def scenario(it: Driver) -> None:
        for name in ("~nobody-has-this-name/x.md", "/dev/null/x.md", "x" * 300):
            it.app.clear_notifications()
            await it.until(lambda: "cannot be written" not in it.text())
            await it.write(f"/export {name}")
            assert "cannot be written" in it.text()

    play(scenario)


def test_a_refused_parameter_is_reported_at_its_field(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f6", "tab", "tab")
        assert "0 is greedy" in it.text()
        await it.press("x", "enter")
        assert "temperature must be from 0 to " in it.text()

    play(scenario, size=(80, 24))


def test_the_key_bar_cuts_no_word(play) -> None:
    async def scenario(it: Driver) -> None:
        for width, height in ((80, 24), (40, 12), (20, 5), (12, 3)):
            await it.pilot.resize_terminal(width, height)
            bar = it.text().splitlines()[-1]
            keys = bar.partition("▏")[0].split("  ")
            labels = {"⏎ Send", "^J New line", "F1 Help", "F2 Decode", "F3 Panel", "F4 Sessions", "F5 Model", ""}
            assert {key.strip() for key in keys} <= labels

    play(scenario, size=(80, 24))


def test_a_paste_is_inserted_once(play) -> None:
    async def scenario(it: Driver) -> None:
        for text, pasted in (
            ("one line", "one line"),
            ("two\nlines", "two\nlines"),
            ("2\r\nlines", "2\nlines"),
            ("two\rlines", "two\nlines"),
        ):
            it.prompt.put("before ")
            it.app.post_message(events.Paste(text))  # as the terminal's driver does
            await it.until(lambda pasted=pasted: it.prompt.text == f"before {pasted}")
            assert it.prompt.cursor_location == it.prompt.document.end

    play(scenario)


def test_a_big_paste_is_folded_and_sent_whole(play) -> None:
    text = "line of a large file\r\n" * 400 + "end"

    async def scenario(it: Driver) -> None:
        it.prompt.post_message(events.Paste(text))
        await it.pilot.pause()
        assert it.prompt.text.startswith("[pasted text 1: 401 lines")
        await it.press("enter")
        await it.idle()
        assert it.said[0] == text.replace("\r\n", "\n")

    play(scenario)


def test_a_line_break_at_the_end_of_a_paste_is_no_line(play) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.paste("line of a large file\n" * 200)
        assert it.prompt.text.startswith("[pasted text 1: 200 lines")

    play(scenario)


def test_a_dead_engine_leaves_the_chat_alive(play) -> None:
    engine = ScriptedEngine().script(Script(["half an ", "answer"], hold=1))

    async def scenario(it: Driver) -> None:
        await it.write("go")
        await it.until(lambda: it.said[-1] == "half an ")
        engine.die()
        await it.until(lambda: "F8 starts it again" in it.text())
        assert it.said == ["go", "half an "]
        assert "✗ the engine died" in it.text()
        await it.press("f8")
        await it.until(lambda: "F8 starts it again" not in it.text())
        await it.ask("are you there?")
        assert it.said[2:] == ["are you there?", "Hello, world."]

    play(scenario, engine)


def test_an_error_of_loading_a_model_is_shown(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.until(lambda: "not enough memory" in it.text())
        assert "F8 tries again" in it.text()
        it.state.engine.load_failure = None
        await it.write("/model org/another")
        await it.press("y")
        await it.until(lambda: it.state.engine.state == "ready")
        await it.until(lambda: "not enough memory" not in it.text())

    play(scenario, ScriptedEngine(load_failure="not enough memory: needs 40 GiB"), ready=False)


@pytest.mark.sampled
@pytest.mark.parametrize(("key", "choice"), [("d", "drop"), ("s", "summarise"), ("n", "new")])
def test_a_full_context_offers_its_choices(play, key: str, choice: str) -> None:
    engine = ScriptedEngine(card_to_load=with_context(64))
    engine.script(Script(), Script(full=True), Script(["short"]), Script(["after"]))

    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.write("two")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        assert "65 tokens" in it.text()
        before = it.state.conversation.session.id
        await it.press(key)
        await it.idle()
        if choice == "drop":
            assert engine.commands[-1].drop_oldest
        elif choice == "summarise":
            assert len(engine.commands) == 4
            assert it.said[-1] == "after"
        else:
            assert it.state.conversation.session.id != before

    play(scenario, engine)


def test_dropped_turns_that_do_not_suffice_are_reported(play) -> None:
    engine = ScriptedEngine(card_to_load=with_context(64))
    engine.script(Script(), Script(full=True), Script(full=True))

    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.write("two")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        await it.press("d")
        await it.until(lambda: "this message alone" in it.text())
        await it.until(lambda: "Esc Stop" not in it.text())
        assert isinstance(it.app.screen, ChatScreen)

    play(scenario, engine)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["d", "s", "n"])
def test_answering_the_full_context_question_restarts_a_dead_engine(play, key: str) -> None:
    engine = ScriptedEngine(card_to_load=with_context(64))
    engine.script(Script(), Script(full=True))

    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.write("two")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        engine.die()
        await it.until(lambda: it.state.conversation.notice)
        await it.press(key)
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        await it.idle()
        assert it.said[-2:] == ["two", "Hello, world."]

    play(scenario, engine)


def test_a_stopped_summary_is_asked_about_again(play) -> None:
    engine = ScriptedEngine(card_to_load=with_context(64))
    engine.script(Script(), Script(full=True), Script(hold=1))

    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.write("two")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        await it.press("s")
        await it.until(lambda: it.state.conversation.phase == "summarising")
        assert isinstance(it.app.screen, ChatScreen)
        await it.press("escape")
        await it.until(lambda: isinstance(it.app.screen, Choose))

    play(scenario, engine)


def test_models_are_listed_switched_and_fetched(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f5")
        models = it.app.screen.query_one("#models", OptionList)
        await it.until(lambda: models.option_count > 3)
        assert "smollm2-135m" in it.text()
        assert "tok/s ≤" in it.text()
        await it.press("enter", "y")
        await it.until(lambda: it.engine.pulls == ["smollm2-135m"])
        await it.until(lambda: "smollm2-135m is installed" in it.text())
        await it.press("escape")
        await it.write("/model qwen3-0.6b")
        assert len(it.engine.specs) == 1
        await it.press("y")
        await it.until(lambda: it.engine.specs[-1].name == "qwen3-0.6b")

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(60, 20), (120, 40)])
def test_a_failed_download_stays_in_its_row(play, size: tuple[int, int]) -> None:
    engine = ScriptedEngine(pull_failure="cannot fetch smollm2-135m: the network is unreachable")

    def words(it: Driver) -> str:
        return " ".join(it.text().replace("│", " ").split())

    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: it.app.screen.query_one("#models", OptionList).option_count > 3)
        await it.press("enter", "y")
        await it.until(lambda: it.state.failed_pulls)
        it.app.clear_notifications()
        await it.until(lambda: "✗ smollm2-135m  cannot fetch" in it.text())
        await it.press("escape", "f5")
        await it.until(lambda: "✗ smollm2-135m  cannot fetch" in it.text())
        await it.until(lambda: "Enter tries again" in words(it))
        await it.press("down")
        await it.until(lambda: "Enter tries again" not in words(it))
        assert "✗ smollm2-135m  cannot fetch" in it.text()
        engine.pull_failure = None
        await it.press("up", "enter", "y")
        await it.until(lambda: len(engine.pulls) == 2)
        await it.until(lambda: not it.state.pulls)
        await it.until(lambda: "✗" not in it.text())
        assert not it.state.failed_pulls

    play(scenario, engine, size=size)


def test_a_mistyped_model_keeps_the_one_that_runs(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/model smolm2-135m")
        await it.until(lambda: "did you mean smollm2-135m" in it.text())
        assert (it.engine.state, len(it.engine.specs)) == ("ready", 1)
        assert it.state.conversation.session.model is None
        await it.ask("still there?")
        assert it.said[-1] == "Hello, world."

    play(scenario)


def test_a_servers_model_is_kept_without_a_question_or_a_picker(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: "a server's model stays" in it.text())
        assert isinstance(it.app.screen, ChatScreen)
        it.app.clear_notifications()
        it.state.notifications_cleared()
        await it.write("/model smollm2-135m")
        await it.until(lambda: "a server's model stays" in it.text())
        assert isinstance(it.app.screen, ChatScreen)
        assert (it.engine.pulls, len(it.engine.specs)) == ([], 1)

    play(scenario, ScriptedEngine(is_remote=True))


def test_the_picker_predicts_as_soon_as_the_bandwidth_is_measured(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f5")
        models = it.app.screen.query_one("#models", OptionList)
        await it.until(lambda: models.option_count > 3)

        def predicted() -> str:
            return str(models.get_option_at_index(0).prompt).split("8,192")[0].split()[-1]

        assert predicted() == "–"
        it.engine._backlog.append(PeakMeasured(PEAK))
        await it.until(lambda: predicted().isdigit())

    play(scenario, ScriptedEngine(card_to_load=replace(CARD, peak=None)))


def test_the_status_line_has_the_share_as_soon_as_the_bandwidth_is_measured(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        assert "MBU" not in it.text().splitlines()[0]
        it.engine._backlog.append(PeakMeasured(PEAK))
        await it.until(lambda: "MBU" in it.text().splitlines()[0])

    play(scenario, ScriptedEngine(card_to_load=replace(CARD, peak=None)), size=(90, 30))


def test_the_status_line_omits_figures_of_the_panel(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await it.press("f3", "f3")
        await it.until(lambda: "tok/s" in it.text().splitlines()[0])
        await it.press("f3")
        await it.until(lambda: "tok/s" not in it.text().splitlines()[0])
        await it.press("f2")
        await it.until(lambda: "  memory " in it.text())
        assert "tok/s" not in it.text().splitlines()[0]

    play(scenario, size=(160, 40))


def test_the_status_line_has_no_speed_where_there_is_no_answer(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await it.until(lambda: "tok/s" in it.text().splitlines()[0])
        await it.press("ctrl+up", "d", "y")
        await it.until(lambda: it.said == ["hello"])
        await it.until(lambda: "tok/s" not in it.text().splitlines()[0])

    play(scenario, size=(90, 30))


def test_a_selected_answer_shows_all_its_figures(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        plain = "4 tokens · 167 tok/s · first token after 0.05 s"
        full = "4 tokens · 167 tok/s · TTFT 50.0 ms · MBU 31 %"
        assert plain in it.text()
        await it.press("ctrl+up")
        await it.until(lambda: full in it.text() and plain not in it.text())
        await it.press("up")
        await it.until(lambda: plain in it.text())
        await it.press("down")
        await it.until(lambda: full in it.text())
        await it.press("escape")
        await it.until(lambda: plain in it.text() and full not in it.text())

    play(scenario, size=(90, 30))


def test_thinking_is_folded_until_asked_for(play) -> None:
    engine = ScriptedEngine().script(Script(["<think>\n", "let me see", "\n</think>\n", "It is 4."]))

    async def scenario(it: Driver) -> None:
        await it.press("ctrl+t", "ctrl+t")
        await it.until(lambda: "thinking sections will be" in it.text())
        await it.ask("2+2")
        assert "▸ thought 3 words" in it.text()
        assert "let me see" not in it.text()
        assert "It is 4." in it.text()
        await it.press("ctrl+t")
        assert "▾ thought" in it.text()
        assert "let me see" in it.text()

    play(scenario, engine)


def test_the_transcript_follows_new_text_until_scrolled_up(play) -> None:
    engine = ScriptedEngine(pieces_per_poll=3).script(Script([f"line {n}\n\n" for n in range(60)], hold=20))

    async def scenario(it: Driver) -> None:
        await it.write("many lines")
        await it.until(lambda: "line 39" in it.text())
        await it.press("pageup")
        top = it.transcript.top
        engine.release()
        await it.idle()
        assert it.transcript.top == top
        assert "line 59" not in it.text()
        await it.press("ctrl+end")
        assert "line 59" in it.text()

    play(scenario, engine)


def test_the_panel_goes_through_its_widths(play) -> None:
    async def scenario(it: Driver) -> None:
        panel = it.app.screen.query_one("#panel")
        assert panel.display
        narrow = panel.size.width
        await it.press("f3")
        assert panel.size.width > narrow
        await it.press("f3")
        assert not panel.display
        await it.press("f3")
        assert panel.display

    play(scenario)


def test_screens_open_and_close_at_any_window_size(play) -> None:
    async def scenario(it: Driver) -> None:
        for width, height in ((1, 1), (8, 3), (40, 10)):
            await it.pilot.resize_terminal(width, height)
            await it.ask("| a | b |\n|---|---|\n| 1 | 2 |")
            for key in ("f2", "escape", "f1", "escape", "f4", "escape"):
                await it.press(key)
            await it.pilot.resize_terminal(120, 40)
            await it.pilot.pause()
            assert "Hello, world." in it.text()

    play(scenario, size=(1, 1), painted=True)


def test_page_keys_do_nothing_in_a_list_without_room(play) -> None:
    """Textual raises for them, since no entry has a line yet."""

    async def scenario(it: Driver) -> None:
        await it.ask("hi")
        for width, height in ((1, 1), (8, 3)):
            await it.pilot.resize_terminal(width, height)
            for opening in ("f4", "f5", "ctrl+p"):
                for key in (opening, "pagedown", "pageup", "escape"):
                    await it.press(key)
        await it.pilot.resize_terminal(120, 40)
        await it.pilot.pause()
        assert "Hello, world." in it.text()

    play(scenario, size=(1, 1), painted=True)


def test_a_loop_is_shown_while_it_lasts(play) -> None:
    engine = ScriptedEngine().script(Script(["round ", "and ", "round"], hold=1, repeats=True))

    async def scenario(it: Driver) -> None:
        await it.write("go")
        await it.until(lambda: "repeated itself for 500 tokens; larger models" in it.text())
        await it.press("escape")
        await it.idle()
        await it.until(lambda: "repeated itself" not in it.text())

    play(scenario, engine)
