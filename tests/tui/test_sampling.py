"""The chat's default sampling, that Again gives another answer, and that the screen says it."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.answer.options import AnswerOptions, recommended_options
from headrace.app.answer.phrases import sampling_text
from headrace.app.chat.answer_setup import WARM
from tests.support.scripted_engine import CARD, ScriptedEngine
from tests.tui.conftest import Driver


@pytest.mark.parametrize(
    ("given", "recommended", "effective"),
    [
        ({}, {"eos_token_id": 2}, "temperature 0"),
        ({}, {"temperature": 0.6, "top_k": 20}, "temperature 0.6 · top_k 20"),
        ({}, {"top_p": 0.8, "do_sample": True}, "temperature 1 · top_p 0.8"),
        ({}, {"do_sample": False, "temperature": 0.6}, "temperature 0"),
        ({"temperature": 0.0}, {"temperature": 0.6}, "temperature 0"),
        ({"temperature": 1.2, "min_p": 0.0}, {}, "temperature 1.2"),
    ],
)
def test_sampling_parameters_are_given_recommended_or_default(
    given: dict[str, Any], recommended: dict[str, Any], effective: str
) -> None:
    options = AnswerOptions.read(given).resolved(recommended_options(recommended))
    assert sampling_text(options.given()) == effective


def test_another_answer_keeps_the_recommended_temperature(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        assert "scripted-1b temperature 0.7 · min_p 0.05" in it.text()
        await it.press("ctrl+b")
        await it.idle()
        assert [command.options for command in it.engine.commands] == [AnswerOptions()] * 2
        assert it.state.conversation.notice is None

    play(scenario)


def test_another_answer_at_temperature_0_is_sampled_and_reported(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/set temperature 0")
        await it.ask("why?")
        assert "scripted-1b temperature 0 " in it.text()
        await it.press("ctrl+b")
        await it.idle()
        first, again = it.engine.commands
        assert first.options.given() == {"temperature": 0.0}
        assert again.options == WARM
        assert "sampled at 0.7" in it.text()
        await it.ask("and then?")
        assert it.engine.commands[-1].options.given() == {"temperature": 0.0}

    play(scenario)


@pytest.mark.sampled
@pytest.mark.parametrize("recommended", [{"do_sample": False}, {}])
def test_a_greedy_model_is_sampled_when_asked_again(recommended: dict[str, Any], play) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("why?")
        await it.press("ctrl+up", "r")
        await it.idle()
        assert [command.options for command in it.engine.commands] == [AnswerOptions(), WARM]

    play(scenario, ScriptedEngine(card_to_load=replace(CARD, generation_defaults=recommended)))


def test_each_further_answer_to_a_question_uses_the_next_seed(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.write("/set seed 7")
        await it.ask("why?")
        for _ in range(2):
            await it.press("ctrl+b")
            await it.idle()
        assert [command.options.seed for command in it.engine.commands] == [7, 8, 9]

    play(scenario)
