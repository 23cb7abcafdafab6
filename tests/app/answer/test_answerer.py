"""Answers of one model: alone and side by side, with errors of their own."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.models.loading.load import LoadedModel, load_model
from headrace.models.text.events import Completed, TextChunk
from headrace.models.text.stop_strings import StopMatcher
from headrace.runtime.engine.request import SequenceFailed
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.machine.sensors import Readings
from tests.support.option_values import VALUES
from tests.support.tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"), name="tiny")


def prepared(answerer: Answerer, text: str, **options: Any) -> Answer:
    return answerer.prepare(answerer.encode([{"role": "user", "content": text}]), AnswerOptions.read(options))


def step_until_done(answerer: Answerer) -> None:
    while answerer.has_work:
        answerer.step()


OF_THE_PROMPT = {"thinking", "chat_template_kwargs"}


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - OF_THE_PROMPT))
def test_every_option_reaches_the_engine_or_the_text(model: LoadedModel, name: str) -> None:
    answerer = Answerer(model)
    usual = prepared(answerer, "a", seed=1)
    changed = prepared(answerer, "a", **{"seed": 1, name: VALUES[name]})
    request = replace(changed.request, cancel=usual.request.cancel)  # a flag of each
    assert request != usual.request or changed._text._has_stops != usual._text._has_stops


def test_an_answer_is_the_same_alone_and_in_a_batch(model: LoadedModel) -> None:
    asked = [("a", {"max_tokens": 9}), ("b", {"max_tokens": 20, "temperature": 1.0, "seed": 3})]
    alone = []
    for text, options in asked:
        answerer = Answerer(model)
        answer = prepared(answerer, text, **options)
        events = list(answerer.stream(answer))
        assert isinstance(events[-1], Completed)
        assert answer.end is events[-1].finished
        assert "".join(event.text for event in events if isinstance(event, TextChunk | Completed)) == answer.text
        alone.append(answer.text)
    answerer = Answerer(model)
    answers = [prepared(answerer, text, **options) for text, options in asked]
    for answer in answers:
        answerer.submit(answer)
    ended = []
    while answerer.has_work:
        ended += [answer for answer, event in answerer.step() if isinstance(event, Completed)]
    assert set(ended) == set(answers)
    assert [answer.text for answer in answers] == alone
    assert [answer.end.seed for answer in answers] == [None, 3]
    assert all(answer.ttft_s is not None and answer.ttft_s <= answer.e2e_s for answer in answers)
    latencies = [len(answer.latencies) for answer in answers]
    assert latencies == [sum(record.tokens for record in answer.records[1:]) for answer in answers]


@pytest.mark.parametrize("decoding", [None, "decoding"])
def test_a_short_answer_has_the_cpu_use_of_its_prefill_too(
    decoding: str | None, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meter says nothing about a fraction of a second."""
    whole = SimpleNamespace(contended=False)
    step = None if decoding is None else SimpleNamespace(contended=True)
    uses = iter([whole, step])

    def meter(_: Any) -> Any:
        use = next(uses)
        return SimpleNamespace(use=lambda: use)

    monkeypatch.setattr("headrace.app.answer.answer.CPUMeter", meter)
    answerer = Answerer(model)
    answer: Any = prepared(answerer, "a", max_tokens=9)
    for _ in answerer.stream(answer):
        pass
    assert answer.cpu_use is (step or whole)
    assert answer.end.summary.busy is (step is not None)


def test_energy_is_that_from_the_first_step_to_the_end(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runtime.machine.energy.LEAST_S", 0.0)
    answerer = Answerer(model)
    answer = prepared(answerer, "a", max_tokens=9)
    looks: list[int] = []

    def look() -> Readings:
        looks.append(len(answer.steps))
        return Readings(joules=10.0 * len(looks), energy_parts="CPU")

    answer.sensors = look
    list(answerer.stream(answer))
    assert answer.energy is not None
    assert (answer.energy.joules, answer.energy.parts) == (10.0, "CPU")
    assert looks[0] == 0  # at the first step, before it counts
    assert looks[1:] == [len(answer.steps)]
    silent = prepared(answerer, "a", max_tokens=9)
    list(answerer.stream(silent))
    assert silent.energy is None


def test_a_stop_rule_that_raises_ends_its_answer_alone(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = Answerer(model)
    failing = prepared(answerer, "a", max_tokens=9, stop="@@")
    other = prepared(answerer, "a", max_tokens=9)
    feed = StopMatcher.feed

    def broken(self: Any, text: str) -> Any:
        if self._stops:
            raise ValueError("wrong")
        return feed(self, text)

    monkeypatch.setattr(StopMatcher, "feed", broken)
    answerer.submit(failing)
    answerer.submit(other)
    ends: dict[Answer, Any] = {}
    while answerer.has_work:
        ends |= {answer: event for answer, event in answerer.step() if isinstance(event, Completed | SequenceFailed)}
    assert isinstance(ends[failing], SequenceFailed)
    assert isinstance(ends[failing].error, EngineError)
    assert isinstance(ends[other], Completed)


def test_a_step_that_raises_leaves_no_work(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = Answerer(model)
    lost = prepared(answerer, "a", max_tokens=9)
    answerer.submit(lost)
    with monkeypatch.context() as patch:
        patch.setattr(model.network, "logits", Mock(side_effect=OSError("broken")))
        with pytest.raises(OSError, match="broken"):
            step_until_done(answerer)
    assert not answerer.has_work
    assert list(answerer.stream(prepared(answerer, "a", max_tokens=1)))


def test_answers_that_are_cancelled_leave_the_engine_idle(model: LoadedModel) -> None:
    answerer = Answerer(model)
    answers = [prepared(answerer, "a", max_tokens=500), prepared(answerer, "b", max_tokens=500)]
    for answer in answers:
        answerer.submit(answer)
    answerer.step()
    answerer.cancel_all()
    assert not answerer.has_work
    assert list(answerer.stream(prepared(answerer, "a", max_tokens=1)))


def test_a_raw_text_is_continued_without_a_template(model: LoadedModel) -> None:
    answerer = Answerer(model)
    prompt = answerer.encode("hi")
    assert len(prompt.ids) == 2
    answer = answerer.prepare(prompt, AnswerOptions(max_tokens=3))
    list(answerer.stream(answer))
    assert answer.end.ended_by == "max_tokens"
    with pytest.raises(UsageError):
        answerer.submit(answerer.prepare(answerer.encode(""), AnswerOptions()))


@pytest.mark.parametrize(
    ("choice", "drafted", "expected"),
    [
        (None, False, "auto"),
        ("ngram", False, "ngram"),
        ("off", False, "off"),
        ("off", True, "off"),
        (None, True, "draft"),
    ],
)
def test_a_draft_model_proposes_unless_speculation_is_off(
    model: LoadedModel, choice: str | None, drafted: bool, expected: str
) -> None:
    answerer = Answerer(model, draft=model.network if drafted else None)
    assert prepared(answerer, "a", speculate=choice).request.speculate == expected
