"""Two answers side by side, in the app over scripted engines."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.config.presets import Preset, save_preset
from headrace.app.config.settings import ScreenSettings, Settings
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.metrics.facts import TurnFigures
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.compare_screen import CompareScreen
from headrace.app.tui.screens.dialogs import Choose
from headrace.app.tui.screens.parallel_screen import FigureLines
from headrace.runtime.machine.machine_load import MachineLoad
from tests.support.scripted_engine import CARD, Script, ScriptedEngine
from tests.tui.conftest import Driver
from tests.tui.test_snapshots import compare

A = "Brass **gears** turn.\n\n- one\n- two"
B = "Water turns the wheel, and the wheel turns the stone."


def scripted(*texts: str) -> ScriptedEngine:
    scripts = [Script([text[n : n + 5] for n in range(0, len(text), 5)]) for text in texts]
    return ScriptedEngine(pieces_per_poll=50).script(*scripts)


async def compared(it: Driver, command: str, question: str = "") -> CompareScreen:
    """`/compare` and, where there is one, a question; both answers are over."""
    await it.write(command)
    await it.until(lambda: isinstance(it.app.screen, CompareScreen), "the comparison's screen")
    screen = it.app.screen
    assert isinstance(screen, CompareScreen)
    if question:
        await write(it, question)
    await over(it)
    return screen


async def write(it: Driver, text: str) -> None:
    it.app.screen.prompt.put(text)  # type: ignore[attr-defined]
    await it.press("enter")


async def over(it: Driver) -> None:
    screen = it.app.screen
    assert isinstance(screen, CompareScreen)
    await it.until(
        lambda: screen.comparison.running is None and all(side.answer for side in screen.comparison.answers),
        "both answers",
    )
    await it.pilot.pause()


def test_an_answer_and_another_one_stand_side_by_side(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        await compared(it, "/compare temperature=1.2")
        text = it.text()
        line = next(line for line in text.splitlines() if "Brass gears turn." in line)
        assert "Water turns the wheel" in line
        assert "A · scripted-1b · temperature 0.7" in text
        assert "B · scripted-1b · temperature 1.2" in text
        assert "one after the other" in text
        assert text.count("tok/s  1.00x") == 2
        assert text.count("TTFT 0.05 s") == 2
        assert text.count("MBU") == 2
        assert "/ 512" in text
        await it.press("escape")
        await it.until(lambda: isinstance(it.app.screen, Choose))
        await it.press("b")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        assert it.said == ["What turns?", B]
        assert it.state.conversation.session.sampling == {"temperature": 1.2}
        assert "‹2/2›" in it.text()
        await it.write("/branch")
        await it.until(lambda: "Brass gears turn." in it.text())
        await it.ask("And on?")  # the chat goes on as ever
        assert it.said[-1] == "Hello, world."

    play(scenario, scripted(A, B))


def test_both_sides_answer_every_question(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.pilot.press("ctrl+s")  # the palette's entry, by its key
        await it.until(lambda: isinstance(it.app.screen, Choose))
        assert "the same model at temperature 1.2" in it.text()
        assert "the same model at temperature 0.7" not in it.text()  # which is what it answers with
        await it.press("escape")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        screen = await compared(it, "/compare temperature 0", "What turns?")
        await write(it, "And what stands?")
        await over(it)
        assert [len(side.messages) for side in screen.comparison.answers] == [4, 4]
        await it.press("ctrl+b")
        await over(it)
        assert len(it.engine.commands) == 6
        await write(it, "/set temperature 3")  # the chat's commands are not messages here
        assert len(it.engine.commands) == 6
        assert it.app.screen.prompt.text == ""  # type: ignore[attr-defined]
        await it.press("escape")
        await it.press("n")
        await it.until(lambda: isinstance(it.app.screen, ChatScreen))
        assert it.said == []
        assert len(it.state.store.messages(it.state.conversation.session.id)) == 9

    play(scenario)


def turn_in(phase: str) -> Any:
    """Return a stand-in of a generation in this phase."""
    return SimpleNamespace(phase=phase, reason=None, summarising=False, repeats=False, save=lambda: None)


@pytest.mark.sampled
@pytest.mark.parametrize("phase", ["queued", "loading", "waiting"])
def test_a_side_that_waits_shows_no_figures_of_an_earlier_answer(play, phase: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        screen = await compared(it, "/compare temperature=1.2")
        pane = screen.panes[1]
        assert pane.metrics.answer.records
        assert pane.metrics.answer.prefill_total
        if phase == "waiting":
            pane.side.turn = turn_in("waiting")
        else:
            pane.side.pending = phase  # type: ignore[assignment]
        assert pane.side.phase == phase
        pane.sync()
        assert not pane.metrics.answer.records
        assert not pane.metrics.answer.prefill_total
        pane.side.turn = None
        pane.side.pending = None

    play(scenario, scripted(A, B), size=(120, 30))


def test_an_answer_beside_other_programs_shows_no_mbu(play) -> None:
    """Only the chat's metrics have the machine's load."""

    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        pane = (await compared(it, "/compare temperature=1.2")).panes[1]
        pane.side.turn = turn_in("answering")
        assert not pane.figures.busy
        for _ in range(2):
            it.state.metrics.set_load(MachineLoad(2, 2.0, 0.3, 1 << 30, 2 << 30, 0, busiest="pip"))
        assert pane.figures.busy
        pane.side.turn = None

    play(scenario, scripted(A, B), size=(120, 30))


def test_a_draft_is_stored_while_the_comparison_closes(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        screen = await compared(it, "/compare temperature=1.2")
        screen.prompt.put("and then")
        await it.pilot.pause()
        await screen.prompt.remove()
        it.state.keep_draft()
        assert it.state.conversation.session.draft.text == "and then"

    play(scenario, scripted(A, B), size=(120, 30))


def test_a_compared_answer_edited_by_hand_is_not_shown_as_stopped(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        await it.write("/edit answer")
        it.prompt.put("The mill.")
        await it.press("enter")
        await compared(it, "/compare temperature=1.2")
        assert "The mill." in it.text()
        assert "✎ edited by hand" in it.text()
        assert "■ stopped" not in it.text()

    play(scenario, scripted(A, B))


def test_esc_stops_one_answer_after_the_other(play) -> None:
    engine = ScriptedEngine().script(Script(["word "] * 40, hold=20), Script(["wort "] * 40, hold=20))

    async def scenario(it: Driver) -> None:
        await it.write("/compare temperature=0")
        await it.until(lambda: isinstance(it.app.screen, CompareScreen))
        await write(it, "Go")
        await it.until(lambda: "● answering" in it.text(), "A answers")
        assert "… queued" in it.text()
        await it.until(lambda: "20 tokens" in it.text(), "A's figures, live")
        assert re.search(r"answering +1[0-9][0-9] tok/s", it.text())
        await it.press("escape")
        await it.until(lambda: "wort" in it.text(), "B answers")
        assert "■ stopped" in it.text()
        await it.press("escape")
        await over(it)
        assert it.text().count("■ stopped") >= 2

    play(scenario, engine)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (80, 50), (100, 24), (60, 16), (40, 12), (200, 50)])
def test_figures_of_both_sides_are_visible_at_every_size(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        await compared(it, "/compare temperature=1.2")
        text = it.text()
        assert text.count("tok/s  1.00x") == 2
        assert text.count("TTFT 0") == (0 if size[1] < 20 else 2)
        if size[1] < 20:
            return  # a line or two of what is said
        assert "Water turns" in text
        both = size[0] >= 100 or size[1] >= 36
        assert ("Brass gears" in text) == both
        if not both:
            await it.press("f3")
            assert "Brass gears" in it.text()
            assert "Water turns" not in it.text()
        await it.pilot.resize_terminal(160, 45)
        await it.until(lambda: "Brass gears" in it.text() and "Water turns" in it.text())
        await it.pilot.resize_terminal(*size)
        await it.until(lambda: ("Water turns" in it.text() and "Brass gears" in it.text()) == both)

    play(scenario, scripted(A, B), size=size)


def test_enter_queues_a_question_while_answers_are_written(play) -> None:
    async def scenario(it: Driver) -> None:
        screen = await compared(it, "/compare temperature=1.2", "first")
        it.engine.script(Script(hold=1))
        await write(it, "second")
        await it.until(lambda: screen.comparison.phase == "answering")
        await write(it, "third")
        assert screen.prompt.text == ""
        assert "⧗ third" in it.text()
        it.engine.release()
        await it.until(lambda: len(it.engine.commands) == 6)
        await over(it)
        questions = [command.messages[-1]["content"] for command in it.engine.commands]
        assert questions == ["first", "first", "second", "second", "third", "third"]
        assert "⧗" not in it.text()

    play(scenario, scripted(A, B))


def test_a_queued_question_returns_after_a_stopped_answer(play) -> None:
    async def scenario(it: Driver) -> None:
        screen = await compared(it, "/compare temperature=1.2", "first")
        it.engine.script(Script(hold=1), Script())
        await write(it, "second")
        await it.until(lambda: screen.comparison.phase == "answering")
        await write(it, "third")
        await write(it, "/queue")
        assert screen.prompt.text == "third"
        await it.press("enter")
        await it.press("escape")
        await it.until(lambda: screen.comparison.running is None and screen.prompt.text == "third")
        assert len(it.engine.commands) == 4

    play(scenario, scripted(A, B))


def test_another_model_is_loaded_for_its_turn(play, monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.app.tui.screens.models_screen  # noqa: F401 - first imported below, it would keep the replaced function

    monkeypatch.setattr("headrace.app.chat.download_plan.check_model_name", lambda _: None)
    monkeypatch.setattr("headrace.app.chat.download_plan.download_plan", lambda _: None)

    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        it.engine.card_to_load = replace(CARD, name="other-1b")
        await compared(it, "/compare other-1b")
        text = it.text()
        assert "B · other-1b" in text
        assert "loaded one at a time" in text
        it.engine.card_to_load = CARD
        await it.press("escape", "a")
        await it.idle()
        assert it.said == ["What turns?", A]
        assert it.state.metrics.model.name == "scripted-1b"
        answers = [m for m in it.state.store.messages(it.state.conversation.session.id) if m.role == "assistant"]
        assert [answer.model for answer in answers] == ["scripted-1b", "other-1b"]

    play(scenario, scripted(A, B))


def test_an_impossible_comparison_is_reported(play) -> None:
    async def scenario(it: Driver) -> None:
        for command, problem in (
            ("/compare no-such-model", "no-such-model"),
            ("/compare temperature=hot", "temperature must be"),
            ("/compare preset=none", "no preset called 'none'"),
            ("/compare warmth=1", "no parameter called 'warmth'"),
            ('/compare system="half', "missing quotation mark"),
        ):
            await it.write(command)
            assert problem in it.text(), it.text()
            assert isinstance(it.app.screen, ChatScreen)
            it.prompt.put("")

    play(scenario)


def test_a_preset_and_a_system_prompt_can_be_compared(play) -> None:
    async def scenario(it: Driver) -> None:
        save_preset("short answers", Preset("Be brief.", {"temperature": 0.1}))
        screen = await compared(it, "/compare short answers", "What turns?")
        assert screen.comparison.answers[1].setup.system == "Be brief."
        assert "system: Be brief." in it.text()
        assert [message["role"] for message in it.engine.commands[1].messages] == ["system", "user"]
        assert [message["role"] for message in it.engine.commands[0].messages] == ["user"]

    play(scenario, size=(160, 45))


def test_quitting_stores_both_answers(play) -> None:
    async def scenario(it: Driver) -> None:
        await compared(it, "/compare temperature=0", "What turns?")
        await it.press("ctrl+q")
        kept = [message.content for message in it.state.store.messages(it.state.conversation.session.id)]
        assert kept == ["What turns?", A, B]

    play(scenario, scripted(A, B))


@pytest.mark.sampled
@pytest.mark.parametrize("leave", [False, True])
def test_unsent_text_of_chat_and_comparison_is_kept(play, leave: bool) -> None:
    async def scenario(it: Driver) -> None:
        it.prompt.put("in the chat")
        it.app.poller.chat.run_command("compare", "temperature=0")  # type: ignore[union-attr]
        await it.until(lambda: isinstance(it.app.screen, CompareScreen))
        it.app.screen.query_one(Prompt).put("half a question")
        if leave:
            await it.press("escape")
            await it.until(lambda: isinstance(it.app.screen, ChatScreen))
            assert it.prompt.text == "half a question\n\nin the chat"
            it.prompt.put("only this")
        await it.press("ctrl+q")
        draft = it.state.store.session(it.state.conversation.session.id).draft
        assert draft.text == ("only this" if leave else "in the chat\n\nhalf a question")

    play(scenario)


@pytest.mark.parametrize("size", [(80, 24), (160, 45)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_compare_screen_matches_its_snapshot(play, tmp_path, size: tuple[int, int]) -> None:
    name = f"compare-{size[0]}x{size[1]}-dark"
    picture: list[str] = []

    async def scenario(it: Driver) -> None:
        await it.ask("What turns?")
        await compared(it, "/compare temperature=1.2")
        it.app.clear_notifications()
        await it.pilot.pause()
        picture.append(it.app.export_screenshot(title="headrace"))

    play(scenario, scripted(A, B), size=size, settings=Settings(screen=ScreenSettings(theme="headrace-dark")))
    compare(picture[0], name, tmp_path / f"{name}.svg")


@pytest.mark.parametrize("width", [56, 60, 67, 68, 77])
def test_both_sides_draw_the_mbu_bar_or_neither(width: int) -> None:
    lines = FigureLines(LiveMetrics())
    drawn = []
    uncached = TurnFigures(1, 33, 0, 9, 0.05, 80.0, "stop", mbu=0.4)
    cached = TurnFigures(1, 12_000, 11_264, 9, 12.25, 80.0, "stop", mbu=0.4)
    for turn in (uncached, cached):
        lines._figures = turn
        drawn.append(lines.lines(lines.metrics, width, 4)[1].plain)
    assert all(len(line) <= width and "MBU  40 %" in line for line in drawn)
    assert len({"█" in line for line in drawn}) == 1
