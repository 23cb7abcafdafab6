"""The welcome text of the sample model: what it is, and the model to fetch in its place."""

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from headrace.app.engine.events import Event
from headrace.app.predict.uses import Recommendation
from headrace.app.tui.screens.dialogs import Choose
from headrace.runtime.errors import UsageError
from tests.support.scripted_engine import CARD, Script, ScriptedEngine
from tests.tui.conftest import Driver

RECOMMENDED = Recommendation("qwen3.5-4b", 3_050_000_000, 70.4, is_limit=False)
SAMPLE = replace(CARD, name="smollm2-135m", is_sample=True)


@dataclass
class SlowFetch(ScriptedEngine):
    """An engine whose downloads do not end before the test lets them."""

    arrived: bool = False

    def _poll_pull(self) -> list[Event]:
        if self._pull is not None and not self.arrived:
            self._pull = (self._pull[0], 0)
        return super()._poll_pull()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("recommended", "line"),
    [
        (RECOMMENDED, "★ qwen3.5-4b, 2.84 GiB, about 70 tok/s: Enter on an empty line fetches it"),
        (replace(RECOMMENDED, is_limit=True), "at most 70 tok/s"),
        (replace(RECOMMENDED, tokens_per_second=None), "★ qwen3.5-4b, 2.84 GiB: Enter"),
        (replace(RECOMMENDED, installed=True), "Enter on an empty line takes it"),
        (None, "F5 lists others"),
    ],
)
def test_the_welcome_text_names_the_sample_and_a_better_model(
    recommended: Recommendation | None, line: str, play
) -> None:
    async def scenario(it: Driver) -> None:
        await it.idle()
        assert "a sample to try headrace with" in it.text()
        assert line in it.text()

    play(scenario, ScriptedEngine(card_to_load=replace(SAMPLE, recommended=recommended)), size=(80, 24))


def test_no_better_model_is_offered_for_other_models_than_the_sample(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.idle()
        assert "sample" not in it.text()
        await it.press("enter")
        assert not isinstance(it.app.screen, Choose)

    play(scenario)


def test_enter_on_an_empty_line_fetches_the_recommended_model_after_a_question(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.idle()
        await it.press("enter")
        assert "download qwen3.5-4b?" in it.text()
        await it.press("n")
        assert len(it.engine.specs) == 1
        await it.press("enter", "y")
        await it.until(lambda: "qwen3.5-4b is loaded once it is here: downloading" in it.text())
        assert it.engine.state == "ready"
        engine.arrived = True
        await it.until(lambda: it.engine.specs[-1].name == "qwen3.5-4b")

    engine = SlowFetch(card_to_load=replace(SAMPLE, recommended=RECOMMENDED))
    play(scenario, engine)


def test_a_refused_model_does_not_cancel_the_awaited_download(play, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise UsageError("not this one")

    async def scenario(it: Driver) -> None:
        await it.idle()
        await it.press("enter", "y")
        await it.until(lambda: it.state.awaited == "qwen3.5-4b")
        with monkeypatch.context() as patch:
            patch.setattr(it.state.conversation, "set_model", refuse)
            assert not it.state.attempt(lambda: it.state.use_model("another"))
        assert it.state.awaited == "qwen3.5-4b"
        engine.arrived = True
        await it.until(lambda: it.engine.specs[-1].name == "qwen3.5-4b")
        assert it.state.awaited is None
        monkeypatch.setattr(it.state.conversation, "set_model", refuse)
        it.state.fetched = "another"
        it.state.use_fetched()
        assert it.state.fetched is None

    engine = SlowFetch(card_to_load=replace(SAMPLE, recommended=RECOMMENDED))
    play(scenario, engine)


def test_the_sample_stays_loaded_where_the_recommended_model_cannot_be_fetched(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.idle()
        await it.press("enter", "y")
        await it.until(lambda: "qwen3.5-4b is not fetched: no network" in it.text())
        assert it.state.engine.state == "ready"
        await it.ask("hello")
        assert "The answer" in it.text()
        assert len(it.engine.specs) == 1

    engine = ScriptedEngine(card_to_load=replace(SAMPLE, recommended=RECOMMENDED), pull_failure="no network")
    play(scenario, engine.script(Script(["The answer"])))


def test_an_answer_continues_while_another_model_downloads(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("hello")
        it.app.poller.chat.run_command("model", "qwen3.5-4b")  # type: ignore[union-attr]
        await it.pilot.pause()
        await it.press("y")
        await it.until(lambda: it.state.fetched)
        assert len(it.engine.specs) == 1
        await it.press("escape")
        await it.until(lambda: it.engine.specs[-1].name == "qwen3.5-4b")
        assert "The answer" in it.text()

    engine = ScriptedEngine(card_to_load=replace(SAMPLE, recommended=RECOMMENDED))
    play(scenario, engine.script(Script(["The answer", " goes on"], hold=1)))


def test_enter_on_an_empty_line_after_a_message_does_nothing(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("hello")
        await it.press("enter")
        assert not isinstance(it.app.screen, Choose)

    play(scenario, ScriptedEngine(card_to_load=replace(SAMPLE, recommended=RECOMMENDED)))
