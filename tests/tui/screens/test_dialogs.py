"""Small questions over the chat: keys that come too fast, the palette, and what cannot be stored on leaving."""

import errno
import os
from pathlib import Path

import pytest
from textual import events
from textual.command import CommandPalette
from textual.widgets import OptionList

from headrace.app.tui.screens import prompt_prefetch
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.screens.models_screen import ModelRow, ModelsScreen
from headrace.app.tui.screens.parameters_screen import ParametersScreen
from headrace.models.registry.store import Store
from headrace.runtime.errors import SessionError
from tests.support.ollama import add_to_ollama
from tests.support.scripted_engine import Script, ScriptedEngine, with_context
from tests.tui.conftest import Driver

ANSWERS = (("yes", "y", "do it"), ("no", "n", "leave it"))


def test_a_question_is_answered_once(play) -> None:
    async def scenario(it: Driver) -> None:
        for keys in ("nnnn", "yn", ["enter", "enter"], ["escape", "escape"], ["y", "escape", "enter"]):
            told: list[str | None] = []
            it.app.push_screen(Choose("sure?", "really?", ANSWERS), told.append)
            await it.pilot.pause()
            for key in keys:  # before anything is done about the first
                it.app.post_message(events.Key(key, key if len(key) == 1 else None))
            await it.until(lambda: isinstance(it.app.screen, ChatScreen))
            await it.pilot.pause()
            assert len(told) == 1, keys
            assert it.text().strip()
            await it.ask(f"still there after {keys}")
            assert it.said[-2] == f"still there after {keys}"

    play(scenario)


def test_the_full_context_question_takes_no_letter_being_typed(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefetch, "_HANDS_OFF_S", float("inf"))
    engine = ScriptedEngine(card_to_load=with_context(64))
    engine.script(Script(), Script(["much", " more"], "length", context_full=True, hold=1))

    async def scenario(it: Driver) -> None:
        await it.ask("one")
        await it.write("two")
        await it.until(lambda: "much" in it.text())
        await it.press(*"and then the second")
        engine.release()
        await it.until(lambda: it.state.conversation.trimming.question is not None)
        await it.idle()
        assert it.prompt.text == "and then the second"
        assert isinstance(it.app.screen, ChatScreen)
        monkeypatch.setattr(prompt_prefetch, "_HANDS_OFF_S", 0.0)
        await it.until(lambda: isinstance(it.app.screen, Choose))

    play(scenario, engine)


def test_the_palette_finds_the_themes(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("ctrl+p", *"theme")
        await it.until(lambda: "choose the colours" in it.text())
        await it.press("enter")
        await it.until(lambda: "headrace-light" in it.text())

    play(scenario)


def test_the_palette_shows_descriptions_and_keys(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("ctrl+p", *"new")
        await it.until(lambda: "Start a new session  Ctrl+N" in it.text())
        await it.press("escape")
        await it.press("ctrl+p", *"resume")  # a word of its help
        await it.until(lambda: "Open another session  F4" in it.text())

    play(scenario)


def test_the_palette_runs_actions_that_are_no_slash_command(play) -> None:
    async def scenario(it: Driver) -> None:
        panel = it.app.poller.chat.query_one("#panel")  # type: ignore[union-attr]
        before = panel.size.width
        await it.press("ctrl+p", *"widen")
        await it.until(lambda: "Widen or close the decode panel  F3" in it.text())
        await it.press("enter")
        await it.until(lambda: panel.size.width != before or not panel.display)

    play(scenario)


def test_no_palette_over_a_screen_of_the_session(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f6", "ctrl+p")
        assert isinstance(it.app.screen, ParametersScreen)
        await it.press("escape", "f2", "ctrl+p")
        assert isinstance(it.app.screen, CommandPalette)

    play(scenario)


def test_parameters_filter_as_one_types(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f6", *"seed")
        await it.until(lambda: "top_p" not in it.text())
        await it.press("enter", *"7", "ctrl+s")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        assert it.state.conversation.session.sampling == {"seed": 7}
        await it.write("/system")
        await it.press(*"Be", "ctrl+s")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        assert it.state.conversation.session.system == "Be"

    play(scenario)


def test_a_refused_parameter_shows_though_the_filter_hid_it(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f6", *"seed", "enter", *"x")
        filter_field = it.app.screen.query_one("#filter")
        filter_field.value = "temperature"  # type: ignore[attr-defined]
        await it.pilot.pause()
        await it.press("ctrl+s")
        await it.until(lambda: "✗" in it.text())
        assert it.app.focused is not None
        assert it.app.focused.id == "seed"
        assert it.app.focused.parent.display  # type: ignore[union-attr]

    play(scenario)


def test_saving_parameters_of_a_deleted_session_is_reported(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f6")
        it.state.store.delete(it.state.conversation.session.id)
        await it.press("ctrl+s")
        await it.until(lambda: "✗" in it.text())
        assert isinstance(it.app.screen, ParametersScreen)

    play(scenario)


def test_unsaved_messages_are_reported_on_leaving(play) -> None:
    engine = ScriptedEngine().script(Script(["half an", "answer"], hold=1))

    async def scenario(it: Driver) -> None:
        await it.write("go")
        await it.until(lambda: "half an" in it.text())
        it.state.store.delete(it.state.conversation.session.id)
        it.state.close()
        assert isinstance(it.state.store_error, SessionError)
        assert it.state.engine.state == "stopped"

    play(scenario, engine)


def test_ctrl_c_without_an_answer_shows_how_to_quit(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f1", "ctrl+c")
        assert isinstance(it.app.screen, ChatScreen)
        await it.press("f2", "ctrl+c")
        await it.until(lambda: "Esc goes back, Ctrl+Q quits" in it.text())

    play(scenario)


def test_a_question_with_a_title_only_has_no_empty_lines(play) -> None:
    async def scenario(it: Driver) -> None:
        it.app.push_screen(Choose("which one?", "", ANSWERS))
        await it.until(lambda: "which one?" in it.text())
        lines = it.text().splitlines()
        first = next(n for n, line in enumerate(lines) if "do it" in line)
        assert "which one?" in lines[first - 2]

    play(scenario)


def test_models_listed_after_the_picker_closed_are_ignored(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: "qwen3-0.6b" in it.text())
        screen = it.app.screen
        assert isinstance(screen, ModelsScreen)
        await it.press("escape")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen) and not screen.children)
        screen._fill(screen._rows)

    play(scenario)


def test_the_model_picker_loads_models_of_other_programs(play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    add_to_ollama(tmp_path, "registry.ollama.ai/library/tiny/1b")
    (Store().root / "a-tiny-broken-one").mkdir(parents=True)

    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: "✓ tiny:1b in Ollama" in it.text())
        await it.press(*"tiny")
        await it.until(lambda: "✗ a-tiny-broken-one" in it.text())
        await it.press("enter")  # takes the first one that can be used
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        await it.until(lambda: it.engine.specs[-1].name == "tiny:1b")

    play(scenario)


def test_an_unreadable_model_folder_is_reported_in_the_list(play, monkeypatch: pytest.MonkeyPatch) -> None:
    def unplugged(*_: object) -> list[ModelRow]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "models")

    monkeypatch.setattr("headrace.app.tui.screens.models_screen.model_rows", unplugged)

    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: os.strerror(errno.EIO) in " ".join(it.text().split()))
        await it.press("escape")
        await it.ask("still there")
        assert it.said[0] == "still there"

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize(("width", "shown"), [(120, True), (60, False)])
def test_the_model_picker_explains_the_columns_it_shows(play, width: int, shown: bool) -> None:
    """A mixture, of which a step reads the active experts, has a speed, too."""

    async def scenario(it: Driver) -> None:
        await it.press("f5")
        await it.until(lambda: "qwen3-8b" in it.text())
        assert ("tok/s ≤" in it.text()) == ("tok/s: at most" in it.text()) == shown
        models = it.app.screen.query_one("#models", OptionList)
        lines = {option.id: str(option.prompt).split() for option in models.options}
        if shown:
            speeds = [float(lines[name][7]) for name in ("qwen3-30b-a3b", "qwen3-8b")]
            assert speeds[0] > speeds[1] > 0

    play(scenario, size=(width, 40))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_keys_and_their_descriptions_stand_apart(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f1")
        text = it.text()
        for key, words in (("Ctrl+J, Shift+Enter", "new line"), ("Enter, in an answer", "queue the message")):
            assert text.split(key)[1].startswith("  "), key
            assert text.split(key)[1].lstrip().startswith(words)

    play(scenario, size=size)


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["f4", "f5", "f6"])
def test_the_keys_of_a_dialog_are_whole_words_in_a_small_window(play, key: str) -> None:
    words = {"Resume", "Rename", "Delete", "Use or download", "Close", "Save", "Discard", "Export …"}

    async def scenario(it: Driver) -> None:
        await it.press(key)
        keys = [part for part in it.text().splitlines()[-1].split("  ") if part.strip()]
        assert keys
        assert all(part.strip().partition(" ")[2] in words for part in keys)

    play(scenario, size=(40, 15))
