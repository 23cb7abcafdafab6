"""The table of answer options: ranges, typed values, precedence."""

from typing import Any

import numpy as np
import pytest

from headrace.app.answer import openai_form
from headrace.app.answer.options import OPTIONS, AnswerOptions, recommended_options, sampling_source
from headrace.app.server import anthropic, responses
from headrace.runtime.config.value_types import Number, parse_value
from headrace.runtime.errors import UsageError
from tests.support.pages import PAGES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("temperature", True), ("temperature", 10**400),
        ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("min_p", 1.1), ("repetition_penalty", 0), ("seed", 2**64),
        ("max_tokens", 0), ("stop", [""]), ("stop", [1]), ("thinking", 0), ("speculate", "draft"),
        ("logit_bias", {"x": 1}), ("logit_bias", {3: float("nan")}), ("logit_bias", [1]),
    ],
)  # fmt: skip
def test_an_option_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be "):
        AnswerOptions.read({name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "logit_bias": {np.int64(5): np.float32(1)}}
    options = AnswerOptions.read({**given, "seed": np.uint64(7)})
    assert options.given() == {"max_tokens": 3, "temperature": 0.5, "logit_bias": {5: 1.0}, "seed": 7}
    assert {type(value) for value in (options.max_tokens, options.temperature, options.seed)} == {int, float}


def test_values_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    read = Number.read
    monkeypatch.setattr(Number, "read", lambda kind, value: checked.append(value) or read(kind, value))
    options = AnswerOptions.read({"temperature": 0.7}).over(AnswerOptions()).resolved(AnswerOptions())
    assert options.sampling_params().temperature == 0.7
    assert checked == [0.7]


def test_options_read_from_json_are_normalized() -> None:
    options = AnswerOptions.read({"temperature": 1, "stop": "END", "logit_bias": {"3": 1}})
    assert options.given() == {"temperature": 1.0, "stop": ("END",), "logit_bias": {3: 1.0}}
    assert AnswerOptions.read(options.given()) == options


@pytest.mark.parametrize("name", OPTIONS)
def test_the_pages_name_every_option(name: str) -> None:
    assert f"`{name}`" in PAGES["docs/batch.md"]
    assert f"--{name.replace('_', '-')}" in PAGES["docs/cli.md"]


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "logit_bias"])
def test_every_value_that_is_typed_can_be_read(name: str) -> None:
    kind = OPTIONS[name].kind
    typed = {"stop": "a | b\\n", "thinking": "off", "speculate": "off", "max_tokens": "1", "schema": "object"}
    typed["chat_template_kwargs"] = '{"preserve_thinking": true}'
    value = parse_value(kind, typed.get(name, "1"))
    assert kind.read(value) == value
    for text in ("", "x"):
        if name not in ("stop", "regex", "grammar"):
            with pytest.raises(ValueError, match=r"."):
                parse_value(kind, text)


def test_given_options_go_before_recommended_ones_and_those_before_greedy_decoding() -> None:
    given = AnswerOptions(top_k=5)
    assert given.resolved(AnswerOptions()).given() == {"temperature": 0.0, "top_k": 5}
    stated = {"temperature": 0.6, "top_k": 64, "top_p": 0.9, "eos_token_id": 3}
    recommended = recommended_options(stated)
    greedy = recommended_options({**stated, "do_sample": False})
    assert given.resolved(recommended).given() == {"temperature": 0.6, "top_k": 5, "top_p": 0.9}
    assert given.resolved(greedy).given() == {"temperature": 0.0, "top_k": 5}
    assert AnswerOptions(temperature=0.0).resolved(recommended).sampling_params().greedy
    assert recommended_options({"do_sample": True, "top_k": 64}).given() == {"temperature": 1.0, "top_k": 64}


@pytest.mark.parametrize(
    ("given", "penalty"),
    [
        (AnswerOptions(), 1.1),
        (AnswerOptions(temperature=0.7), 1.1),
        (AnswerOptions(repetition_penalty=1.3), 1.3),
        (AnswerOptions(temperature=0.0), 1.0),
        (AnswerOptions(temperature=1e-9), 1.0),
        (AnswerOptions(temperature=0.0, repetition_penalty=1.2), 1.2),
    ],
)
def test_a_recommended_repetition_penalty_leaves_greedy_answers_alone(given: AnswerOptions, penalty: float) -> None:
    recommended = AnswerOptions(temperature=0.2, repetition_penalty=1.1)
    assert given.resolved(recommended).sampling_params().repetition_penalty == penalty


def test_a_recommended_repetition_penalty_without_a_temperature_has_no_effect_on_greedy_answers() -> None:
    recommended = AnswerOptions(repetition_penalty=1.3)
    assert AnswerOptions().resolved(recommended).given() == {"temperature": 0.0}
    assert AnswerOptions(temperature=0.7).resolved(recommended).repetition_penalty == 1.3
    assert AnswerOptions(repetition_penalty=1.1).resolved(recommended).repetition_penalty == 1.1


def test_the_source_of_the_temperature_is_reported() -> None:
    warm = AnswerOptions(temperature=0.5)
    none = AnswerOptions(top_k=5)
    assert sampling_source({"options": none, "settings": none}, AnswerOptions()) == "default"
    assert sampling_source({"options": none, "settings": none}, warm) == "model"
    assert sampling_source({"options": none, "settings": none}, AnswerOptions(temperature=0.0)) == "model"
    assert sampling_source({"options": none, "settings": warm}, warm) == "settings"
    assert sampling_source({"options": warm, "session": warm}, AnswerOptions()) == "options"


def test_no_endpoint_refuses_an_option_of_ours() -> None:
    """A field that was refused as unknown has to leave that list once there is an option of this name."""
    refused = openai_form.REFUSED | anthropic.REFUSED | responses.REFUSED
    assert not refused & OPTIONS.keys()


def test_thinking_is_a_switch_a_level_or_a_budget() -> None:
    read = OPTIONS["thinking"].kind.read
    assert [read(value) for value in (True, "on", False, "off")] == [True, True, False, False]
    assert [read(value) for value in ("low", "medium", "high")] == ["low", "medium", "high"]
    assert [read(value) for value in (1, "1", 4096)] == [1, 1, 4096]
    assert read(1) is not True
    for value in ("most", "0", "-1", "1.5", "", 1.5, -3, None, [1]):
        with pytest.raises(ValueError, match=r"on, off, low, medium, high or a number of tokens"):
            read(value)
