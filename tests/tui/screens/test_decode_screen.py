"""The decode view of F2: its meters, its help, and frozen figures."""

import json

import pytest
from msgspec.structs import replace
from rich.color import ColorSystem, ColorType
from textual.content import Content
from textual.events import Paste
from textual.widgets import Static

from headrace.app.engine.commands import TIMED_EVERY
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.panel import Sections
from headrace.app.tui.decode.step import StepSection
from headrace.app.tui.input.ask_line import AskLine
from headrace.runtime.config.paths import data_dir
from headrace.runtime.machine.machine_load import MachineLoad
from tests.support.scripted_engine import CARD, Script, ScriptedEngine
from tests.tui.conftest import Driver


def test_a_digit_shows_and_hides_a_section(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2")
        assert not it.app.screen.query_one(LatencySection).display, "no steps yet"
        await it.press("f2")
        await it.ask("go")
        await it.press("f2")
        sections = it.app.screen.query_one(Sections)
        before = [section.NAME for section in sections.shown]
        assert it.app.screen.query_one(LatencySection).display
        assert before == ["step", "context"]
        await it.press("4")
        assert sections.shown[0].NAME == "roofline"
        await it.press("4")
        assert [section.NAME for section in sections.shown] == before
        await it.press("a", "4")  # a digit of a message
        assert it.app.screen.query_one(AskLine).value == "a4"
        assert [section.NAME for section in sections.shown] == before

    play(scenario, ScriptedEngine().script(Script(["word "] * 20)), size=(80, 24))


@pytest.mark.sampled
@pytest.mark.parametrize(("key", "name"), [("3", "context"), ("7", "machine"), ("tab", "turns")])
def test_a_small_window_shows_a_section_in_the_place_of_the_steps(play, key: str, name: str) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("go")
        await it.press("f2")
        steps = it.app.screen.query_one(LatencySection)
        sections = it.app.screen.query_one(Sections)
        assert (steps.display, sections.display) == (True, False)
        await it.press(key)
        assert (steps.display, sections.display) == (False, True)
        assert name == sections.shown[0].NAME
        assert sections.shown[0].region.height >= 6
        await it.press(key)
        assert (steps.display, sections.display) == (True, False)

    play(scenario, ScriptedEngine().script(Script(["word "] * 20)), size=(40, 15))


def test_meters_keep_their_place_while_load_changes(play) -> None:
    async def scenario(it: Driver) -> None:
        # Help before the first answer
        await it.press("f2")
        await it.press("f1")
        assert "Each token reads" in it.text()
        assert "No speed yet" in it.text()
        await it.press("escape", "f2")

        # A line on other programs appears, and the meters stay
        await it.ask("go")
        await it.press("f2")
        line = it.app.screen.query_one(MeterLines)
        assert "167 tok/s" in it.text()  # of the scripted engine's steps
        place = line.region
        for _ in range(2):
            it.state.metrics.set_load(MachineLoad(2, 2.0, 0.3, 1, 2, 0, busiest="a-program-with-a-long-name"))
        it.state.metrics.version += 1
        it.app.poller.draw_metrics(force=True)
        await it.pilot.pause()
        await it.until(lambda: "Other programs use" in it.text())
        assert line.region == place
        assert line.size.height == MeterLines.HEIGHT
        sections = it.app.screen.query_one(Sections)
        assert sum(one.region.area for one in sections.shown) == sections.region.area, "places of a higher window"

        # Frozen figures: explained, exported as a trace, and continued
        await it.press("f7")
        assert "❚❚ frozen, F7 continues" in it.text()
        assert it.app.screen.has_class("-frozen")
        await it.press("f1")
        assert "mostly" in it.text()
        await it.press("escape")
        await it.press("ctrl+x")
        (written,) = (data_dir() / "exports").glob("trace-*.json")
        events = json.loads(written.read_text())["traceEvents"]
        assert sum(event.get("cat") == "decode" for event in events) == 20
        written.unlink()
        await it.press("f7")
        assert "frozen" not in it.text()
        await it.press("x")  # a letter of somebody who types
        assert list((data_dir() / "exports").iterdir()) == []
        await it.press("backspace")
        it.app.clear_notifications()

        # Help of this screen: its keys alone, and the figures that it shows
        for keys in (("f7", "f1"), ("f1",)):
            await it.press(*keys)
            text = it.text()
            assert "this screen" in text
            assert "Newest step" in str(it.app.screen.query_one("#help-keys", Static).render())
            assert "commands" not in text
            assert "writing" not in text
            await it.press("escape")
        section = it.app.screen.query_one(StepSection)
        assert isinstance(section.tooltip, Content)
        assert "parts of a step: `model weights`" in section.tooltip.plain
        names = [each.name for each in it.app.screen.figures]  # type: ignore[attr-defined]
        assert len(names) == len(set(names))
        assert {"tok/s", "MBU", "step latency"} <= set(names)
        assert "batch size" not in names

    play(scenario, ScriptedEngine().script(Script(["word "] * 20)), size=(80, 24))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(40, 15), (80, 24)], ids=str)
def test_the_keys_to_go_back_and_for_help_are_shown(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2")
        assert it.text().splitlines()[-1].lstrip().startswith("F2 Back  F1 Help")

    play(scenario, size=size)


@pytest.mark.sampled
@pytest.mark.parametrize("theme", ["headrace-dark", "headrace-light", "ansi-dark"])
def test_a_placeholder_is_visible_in_16_colours(play, theme: str) -> None:
    async def scenario(it: Driver) -> None:
        it.app.theme = theme
        await it.press("f2")
        strip = it.app.screen.query_one(AskLine).render_line(0)
        (style,) = [segment.style for segment in strip if "sk here, and watch" in segment.text]
        assert style is not None
        assert style.color is not None
        assert style.bgcolor is not None
        text, ground = (each.downgrade(ColorSystem.STANDARD) for each in (style.color, style.bgcolor))
        assert text.type is ColorType.DEFAULT or text != ground

    play(scenario, size=(80, 24))


def test_a_question_can_be_asked_on_the_decode_screen(play) -> None:
    engine = ScriptedEngine().script(Script(["one ", "two "]), Script(["three "]))

    async def scenario(it: Driver) -> None:
        await it.ask("go")
        await it.press("f2")
        await it.press(*"and why".replace(" ", "_"), "left", "x", "enter")
        await it.idle()
        assert it.said[-2:] == ["and_whxy", "three "]
        await it.press("slash", *"nonsense", "enter")
        await it.until(lambda: "/nonsense: unknown command" in it.text())
        assert it.prompt.text == ""
        it.app.clear_notifications()
        await it.press("f2")
        it.prompt.put("two\nlines")
        await it.press("f2", "x")
        assert it.prompt.text == "two\nlines"
        await it.press("f2")
        it.prompt.put("")
        await it.press("f2")
        it.app.screen.line.post_message(Paste("three\nlines"))  # type: ignore[attr-defined]
        await it.until(lambda: it.prompt.text == "three\nlines")
        await it.until(lambda: "F2 goes back to the text" in it.text())
        assert it.prompt.text == "three\nlines"

    play(scenario, engine, size=(80, 24))


@pytest.mark.parametrize(("kernels", "every"), [("native", 1), ("reference", None)])
def test_every_step_is_timed_on_request(play, kernels: str, every: int | None) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2", "f10")
        assert it.engine.timed_every == every
        await it.press("f7", "f10")
        assert it.engine.timed_every == (None if every is None else TIMED_EVERY)
        assert ("only the CPU kernels" in it.text()) == (every is None)

    engine = ScriptedEngine(card_to_load=replace(CARD, kernels={"kernels": kernels}))
    play(scenario, engine, size=(120, 40))


def test_the_empty_decode_view_announces_its_content(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2")
        assert it.app.screen.query_one(Sections).shown == []
        assert "An answer shows here, step by step" in it.text()
        await it.press("4")  # a section that is asked for says what it waits for
        assert "after the first answer" in it.text()

    play(scenario, size=(80, 24))


def test_the_decode_view_is_not_cut_at_usual_sizes(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("go")
        await it.press("f2")
        for key in ("4", "5", "6", "7", "tab"):
            await it.press(key)
            assert "…" not in "\n".join(it.text().splitlines()[1:]), "below the title of the session"

    play(scenario, ScriptedEngine().script(Script(["word "] * 20)), size=(80, 24))
