"""The decode view of F2: its sentence, its help, and frozen figures."""

import json

from textual.content import Content

from headrace.app.tui.decode.bandwidth import BandwidthSection
from headrace.app.tui.decode.speed import SentenceLines
from headrace.runtime.config.paths import data_dir
from headrace.runtime.machine.load import Load
from tests.app.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver


def test_sentence_help_and_freeze(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f2")
        assert "Each token reads" in it.text()
        assert "No speed yet" in it.text()
        await it.press("f2")
        await it.ask("go")
        await it.press("f2")
        line = it.app.screen.query_one(SentenceLines)
        assert "You get 167:" in it.text()
        for _ in range(2):
            it.state.metrics.set_load(Load(2, 2.0, 0.3, 1, 2, 0, busiest="a-program-with-a-long-name"))
        it.state.metrics.version += 1
        it.app.poller.draw_metrics(force=True)
        await it.pilot.pause()
        await it.until(lambda: "mostly a-program-with-a-long-n" in it.text().replace("\n", " "))
        assert line.size.height >= 2
        await it.press("f7")
        assert "❚❚ frozen, F7 continues" in it.text()
        assert it.app.screen.has_class("-frozen")
        await it.press("x")
        (written,) = (data_dir() / "exports").glob("trace-*.json")
        events = json.loads(written.read_text())["traceEvents"]
        assert sum(event.get("cat") == "decode" for event in events) == 20
        written.unlink()
        await it.press("f7")
        assert "frozen" not in it.text()
        await it.press("x")  # a letter of somebody who types
        assert list((data_dir() / "exports").iterdir()) == []
        for key in ("question_mark", "f1"):
            await it.press(key)
            text = it.text()
            assert "this screen" in text
            assert "Newest step" in text
            assert "commands" not in text
            assert "writing" not in text
            await it.press("escape")
        section = it.app.screen.query_one(BandwidthSection)
        assert isinstance(section.tooltip, Content)
        assert "MBU: Part of this machine's memory bandwidth" in section.tooltip.plain
        names = [each.name for each in it.app.screen.figures]  # type: ignore[attr-defined]
        assert len(names) == len(set(names))
        assert {"tok/s", "MBU", "step latency"} <= set(names)
        assert "batch size" not in names

    play(scenario, ScriptedEngine().script(Script(["word "] * 20)), size=(80, 24))
