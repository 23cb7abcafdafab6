"""Answers of a model that babbles, with schemas: each is valid, and the same however it is computed."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from msgspec.structs import replace

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import AnswerOptions
from headrace.app.answer.response_format import flat_format, read_response_format
from headrace.models.loading.load import LoadedModel, load_model
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.speculation.controller import Controller
from tests.support.schemas import REAL, made
from tests.support.speculating import Always
from tests.support.tiny_chat import IM_END, write_chat_model

# Bytes that end strings, numbers and lists: a random model would go on for thousands of tokens.
_ENDS = {'"': 9.0, "@": 7.0, "}": 6.0, "]": 6.0, ",": 3.0}
LONGEST = 1500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"), name="tiny")


@pytest.fixture(scope="module")
def answerer(model: LoadedModel) -> Answerer:
    return _answerer(model)


def _answerer(model: LoadedModel, controller: type[Controller] = Always) -> Answerer:
    answerer = Answerer(model, max_running=8)
    answerer.engine._drafting.controller = controller()
    return answerer


class Never(Controller):
    """Verifies no draft token."""

    def pays(self, _sequences: int, _chance: float, _cost_s: float = 0.0, **_: Any) -> bool:
        return False


def _options(answerer: Answerer, schema: Any, **changes: Any) -> AnswerOptions:
    bias = {answerer.model.tokenizer.encode(text)[0]: value for text, value in _ENDS.items()} | {IM_END: 6.0}
    return replace(AnswerOptions(schema=schema, max_tokens=LONGEST, logit_bias=bias, seed=5), **changes)


def _prepared(answerer: Answerer, options: AnswerOptions) -> Answer:
    return answerer.prepare(answerer.encode([{"role": "user", "content": "Go."}]), options)


def _together(answerer: Answerer, options: Iterable[AnswerOptions]) -> list[Answer]:
    answers = [_prepared(answerer, each) for each in options]
    for answer in answers:
        answerer.submit(answer)
    while answerer.has_work:
        answerer.step()
    return answers


def _check(schema: Mapping[str, Any], answer: Answer) -> None:
    answer.check_whole()
    checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker(schema, format_checker=checker.FORMAT_CHECKER).validate(json.loads(answer.text))
    assert "\n" not in answer.text


def test_answers_fit_schemas_of_real_programs(answerer: Answerer, model: LoadedModel) -> None:
    """Greedy and sampled, with draft tokens, without them, in a batch and alone."""
    plain = _answerer(model, Never)
    options = [
        _options(answerer, schema, temperature=temperature) for schema in REAL.values() for temperature in (0.0, 1.0)
    ]
    batched = _together(answerer, options)
    without = _together(plain, options)
    for place, (one, other) in enumerate(zip(batched, without, strict=True)):
        _check(list(REAL.values())[place // 2], one)
        assert one.text == other.text
        assert other.end.summary.proposed == 0
    assert sum(answer.end.summary.steps for answer in batched) < 0.8 * sum(
        answer.end.summary.completion_tokens for answer in batched
    )
    for place in range(0, len(options), 7):
        alone = _prepared(answerer, options[place])
        for _ in answerer.stream(alone):
            pass
        assert alone.text == batched[place].text


@given(schema=made())
def test_answers_fit_generated_schemas(answerer: Answerer, schema: dict[str, Any]) -> None:
    options = [_options(answerer, schema, temperature=t, speculate=way) for t in (0.0, 1.0) for way in ("off", "ngram")]
    answers = _together(answerer, options)
    for answer in answers:
        _check(schema, answer)
    assert answers[0].text == answers[1].text
    assert answers[2].text == answers[3].text


def test_answers_fit_regular_expressions_and_grammars(answerer: Answerer) -> None:
    lark = 'start: "<" word (" " word){1,3} ">"\nword: /[a-c]{1,4}/'
    for temperature in (0.0, 1.0):
        changes: dict[str, Any] = {"temperature": temperature}
        (regex, grammar, objects) = _together(
            answerer,
            [
                _options(answerer, None, **changes, regex="(ja|nein)[.!]"),
                _options(answerer, None, **changes, grammar=lark),
                _options(answerer, {"type": "object"}, temperature=temperature),
            ],
        )
        assert regex.text in {"ja.", "ja!", "nein.", "nein!"}
        assert grammar.text.strip("<>abc ") == ""
        assert grammar.text.endswith(">")
        assert isinstance(json.loads(objects.text), dict)


def test_sampling_stages_follow_the_mask(answerer: Answerer) -> None:
    """A bias chooses among allowed tokens, and top-k counts them only."""
    no = answerer.model.tokenizer.encode("n")[0]
    for changes in ({"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}):
        options = AnswerOptions(regex="yes|no", logit_bias={no: 90.0, IM_END: 99.0, 7: 99.0}, **changes)
        [answer] = _together(answerer, [options])
        assert answer.text == "no"


def test_a_truncated_structured_answer_is_an_error(answerer: Answerer) -> None:
    [answer] = _together(answerer, [_options(answerer, REAL["invoice"], max_tokens=9)])
    assert answer.end.ended_by == "max_tokens"
    with pytest.raises(EngineError, match="max tokens"):
        answer.check_whole()


def test_a_schema_that_cannot_be_honoured_fails_before_the_answer(answerer: Answerer) -> None:
    with pytest.raises(UsageError, match="uniqueItems"):
        _prepared(answerer, AnswerOptions(schema={"type": "array", "uniqueItems": True}))
    assert not answerer.has_work


def test_grammar_and_schema_options_are_exclusive() -> None:
    with pytest.raises(UsageError):
        AnswerOptions.read({"schema": {}, "regex": "a"})
    below = AnswerOptions(schema={"type": "object"}, temperature=0.5)
    assert AnswerOptions(regex="a").over(below) == AnswerOptions(regex="a", temperature=0.5)
    assert AnswerOptions().over(below) == below
    assert AnswerOptions.read(json.loads(json.dumps(below.stored()))) == below


def test_response_formats_are_read_or_refused() -> None:
    schema = {"type": "integer"}
    assert read_response_format({"type": "text"}) == {}
    assert read_response_format({"type": "json_object"}) == {"schema": {"type": "object"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert read_response_format(wanted) == {"schema": schema}
    for wrong in (
        {"type": "json_schema"},
        {"type": "grammar"},
        "json_object",
        {},
        {"type": "json_schema", "json_schema": {}},
    ):
        with pytest.raises(UsageError):
            read_response_format(wrong)


def test_errors_of_flat_formats_name_their_field() -> None:
    schema = {"type": "integer"}
    assert flat_format({}, "text.format") == {}
    assert flat_format({"type": "text"}, "text.format") == {}
    assert flat_format({"type": "json_schema", "schema": schema}, "text.format") == {"schema": schema}
    with pytest.raises(UsageError, match=r"^text\.format of type json_schema needs a schema$"):
        flat_format({"type": "json_schema"}, "text.format")
    for wrong in ({"type": "grammar"}, {"schema": schema}):
        with pytest.raises(UsageError, match=r"^text\.format must be"):
            flat_format(wrong, "text.format")


@pytest.mark.sampled
@pytest.mark.parametrize("opened", [True, False], ids=["by the prompt", "by the model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_schema_applies_after_the_thinking(tmp_path: Path, opened: bool, temperature: float) -> None:
    """The thinking's budget ends it; alone and in a batch."""
    directory = write_chat_model(tmp_path / "tiny")
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{# </think> #}<|im_start|>"
    (directory / "chat_template.jinja").write_text(template + ("<think>\n" if opened else ""))
    answerer = _answerer(load_model(directory, name="tiny"))
    messages = [{"role": "user", "content": "Go."}]
    options = _options(answerer, REAL["sentiment"], temperature=temperature, thinking=7)
    if not opened:
        first = {answerer.model.tokenizer.encode("<")[0]: 60.0}
        options = replace(options, logit_bias={**(options.logit_bias or {}), **first})
    prompt = answerer.encode(messages, thinking=7)
    answers = [answerer.prepare(prompt, options) for _ in range(2)]
    for answer in answers:
        answerer.submit(answer)
    while answerer.has_work:
        answerer.step()
    alone = answerer.prepare(prompt, options)
    for _ in answerer.stream(alone):
        pass
    assert answers[0].text == answers[1].text == alone.text
    assert (alone.prompt.opening + alone.text).startswith("<think>")
    assert "</think>" in alone.text
    assert set(json.loads(alone.result)) == {"label", "confidence"}
    off = answerer.prepare(answerer.encode(messages), replace(options, thinking=False, logit_bias=None))
    if not opened:
        for _ in answerer.stream(off):
            pass
        assert off.text.startswith('{"label":')
