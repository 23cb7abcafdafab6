"""Batches through the engine: every answer is the one the line has by itself, whatever form, order or interruption."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import DEFAULTS as ANSWER_DEFAULTS
from headrace.app.answer.options import AnswerOptions
from headrace.app.batch.output import ResultFile, ResultStream
from headrace.app.batch.parse import BatchDefaults, BatchLine, parse_lines
from headrace.app.batch.progress import progress_text
from headrace.app.batch.run_batch import Batch, Tally
from headrace.models.loading.load import LoadedModel, load_model
from headrace.models.text.stop_strings import StopMatcher
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import ContextLimitError
from headrace.runtime.sampling.sampler import Sampler
from tests.support.tiny_chat import IM_END, write_chat_model

DEFAULTS = BatchDefaults(options=AnswerOptions(max_tokens=12), model="tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_chat_model(tmp_path_factory.mktemp("batch") / "tiny", context=512), name="tiny")


def nothing(_batch: Batch, _tokens: int) -> None:
    pass


def run(
    model: LoadedModel,
    lines: Sequence[object],
    *,
    parallel: int = 3,
    in_order: bool = False,
    watch: Callable[[Batch, int], None] = nothing,
    cancel: CancelFlag | None = None,
) -> tuple[list[dict[str, Any]], Tally]:
    parsed = parse_lines([json.dumps(line).encode() for line in lines], DEFAULTS)
    said = io.StringIO()
    tally = Tally(total=len(parsed), kept=0)
    output = ResultStream(said, [line.number for line in parsed] if in_order else None)
    answerer = Answerer(model, max_running=parallel)
    Batch(answerer, parsed, output, tally, parallel).run(cancel or CancelFlag(), watch)
    output.close()
    assert not answerer.has_work
    return [json.loads(line) for line in said.getvalue().splitlines()], tally


def alone(model: LoadedModel, line: dict[str, Any]) -> str:
    (parsed,) = parse_lines([json.dumps(line).encode()], DEFAULTS)
    assert isinstance(parsed, BatchLine)
    answerer = Answerer(model)
    prompt = answerer.encode(parsed.prompt, thinking=parsed.options.thinking)
    answer = answerer.prepare(prompt, parsed.options.over(ANSWER_DEFAULTS))
    for _ in answerer.stream(answer):
        pass
    return answer.text


def test_every_line_has_the_answer_it_has_alone(model: LoadedModel) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "b " * 40, "max_tokens": 30},
        {"prompt": "c", "temperature": 1.3, "seed": 5, "max_tokens": 20},
        {"prompt": "d", "raw": True, "max_tokens": 1},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "e"}]},
        {"prompt": "f", "temperature": 1, "top_p": 0.9, "seed": 1, "repetition_penalty": 1.2},
        {"prompt": "g", "logit_bias": {str(IM_END): 100}},
    ]
    results, tally = run(model, lines)
    assert sorted(said["line"] for said in results) == list(range(1, 8))
    for said in results:
        assert said["text"] == alone(model, lines[said["line"] - 1])
        assert said["error"] is None
        assert said["usage"]["total_tokens"] == said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"]
        assert said["timing"]["e2e_s"] >= (said["timing"]["ttft_s"] or 0) >= 0
    ends = {said["line"]: (said["finish_reason"], said["ended_by"]) for said in results}
    assert ends[4] == ("length", "max_tokens")
    assert ends[7] == ("stop", "end_of_turn")
    assert (tally.answered, tally.failed, tally.remaining) == (7, 0, 0)
    assert tally.completion_tokens == sum(said["usage"]["completion_tokens"] for said in results)
    assert len(tally.e2e_s) == 7


def test_results_come_as_they_finish_or_in_order(model: LoadedModel) -> None:
    lines = [{"prompt": "a", "max_tokens": 30}, {"prompt": "b", "max_tokens": 2}, {"prompt": "c", "max_tokens": 3}]
    results, _ = run(model, lines)
    assert results[-1]["line"] == 1
    results, _ = run(model, lines, in_order=True)
    assert [said["line"] for said in results] == [1, 2, 3]


def test_a_stop_string_ends_only_its_line(model: LoadedModel) -> None:
    whole = alone(model, {"prompt": "a", "max_tokens": 40})
    stop = whole[len(whole) // 2 :][:2]
    results, _ = run(model, [{"prompt": "a", "max_tokens": 40, "stop": stop}, {"prompt": "a", "max_tokens": 40}])
    cut, full = sorted(results, key=lambda said: int(said["line"]))
    assert (cut["finish_reason"], cut["ended_by"]) == ("stop", "stop_string")
    assert cut["text"] == whole[: whole.index(stop)]
    assert full["text"] == whole


@pytest.mark.parametrize("part", [Sampler.adjust, StopMatcher.feed])
def test_an_error_of_one_answer_fails_its_line_only(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, part: Callable[..., Any]
) -> None:
    """A sampler in the engine, and a stop rule of the text."""
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 30},
        {"prompt": "b", "max_tokens": 30, "stop": "@@", "frequency_penalty": 0.5},
        {"prompt": "c", "max_tokens": 30, "temperature": 1, "seed": 3},
    ]
    whole = [alone(model, line) for line in lines]
    called: list[object] = []

    def failing(self: Any, *given: Any) -> Any:
        if isinstance(self, Sampler) or self._stops:
            called.append(self)
            if len(called) == 5:
                raise ValueError("wrong")
        return part(self, *given)

    monkeypatch.setattr(Sampler if part is Sampler.adjust else StopMatcher, part.__name__, failing)
    results, tally = run(model, lines)
    first, failed, third = sorted(results, key=lambda said: int(said["line"]))
    assert failed["error"] == {"code": "failed", "message": "the answer failed: ValueError: wrong"}
    assert [first["text"], third["text"]] == [whole[0], whole[2]]
    assert (tally.answered, tally.failed, tally.remaining) == (2, 1, 0)


def test_an_invalid_line_fails_alone(model: LoadedModel) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": 1},
        {"prompt": "x" * 600},
        {"prompt": "b", "logit_bias": {"9999": 1}},
        {"prompt": "b"},
    ]
    results, tally = run(model, lines)
    errors = {said["line"]: said["error"]["code"] for said in results if said["error"]}
    assert errors == {2: "invalid_request", 3: "context_length_exceeded", 4: "invalid_request"}
    assert (tally.answered, tally.failed) == (2, 3)
    assert [number for number, _ in tally.errors] == [2, 3, 4]
    assert isinstance(tally.errors[1][1], ContextLimitError)


def test_the_openai_form_answers_in_that_form(model: LoadedModel) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    results, _ = run(
        model,
        [
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 3}},
            {"custom_id": "c", "body": {**chat, "temperature": 9e9}},
        ],
    )
    said = {one["custom_id"]: one for one in results}
    assert all(one["id"].startswith("batch_req_") for one in results)
    done = said["a"]["response"]
    plain = said["b"]["response"]
    wrong = said["c"]["response"]
    assert (done["status_code"], plain["status_code"], wrong["status_code"]) == (200, 200, 400)
    assert done["body"]["object"] == "chat.completion"
    message = {"role": "assistant", "content": alone(model, {**chat}), "refusal": None}
    assert done["body"]["choices"][0]["message"] == message
    assert done["body"]["choices"][0]["finish_reason"] == "length"
    assert plain["body"]["choices"][0]["text"] == alone(model, {"prompt": "hi", "raw": True, "max_tokens": 3})
    assert plain["body"]["usage"]["completion_tokens"] == 3
    assert wrong["body"]["error"]["code"] == said["c"]["error"]["code"] == "invalid_request"
    assert said["a"]["error"] is None


def test_an_interrupted_batch_resumes(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    raw = [json.dumps({"prompt": str(number), "max_tokens": 2 + number % 5}).encode() for number in range(12)]
    parsed = parse_lines(raw, DEFAULTS)
    answerer = Answerer(model, max_running=4)
    written: list[int] = []
    for _ in range(20):
        file = ResultFile(path)
        file.begin({line.digest: line.number for line in parsed}, in_order=True)
        left = [line for line in parsed if line.digest not in file.answered]
        tally = Tally(total=12, kept=12 - len(left))
        cancel = CancelFlag()

        def stop_soon(batch: Batch, _tokens: int, cancel: CancelFlag = cancel) -> None:
            if batch.tally.answered >= 3:
                cancel.set()

        Batch(answerer, left, file, tally, 4).run(cancel, stop_soon)
        file.close()
        written.append(tally.answered)
        if not tally.remaining:
            break
        with path.open("ab") as torn:
            torn.write(b'{"line": 3, "requ')
    assert len(written) > 1
    assert sum(written) == 12
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [said["line"] for said in results] == list(range(1, 13))
    assert results[7]["text"] == alone(model, {"prompt": "7", "max_tokens": 4})


def test_concurrency_is_limited(model: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    lines = [{"prompt": str(number), "max_tokens": 3 + number} for number in range(7)]
    run(
        model,
        lines,
        parallel=2,
        watch=lambda batch, _tokens: seen.append((batch.counts().running, batch.counts().waiting)),
    )
    assert max(running for running, _ in seen) == 2
    assert seen[-1] == (0, 0)


def test_progress_begins_with_the_most_important(model: LoadedModel) -> None:
    said: list[str] = []
    run(
        model,
        [{"prompt": "a", "max_tokens": 2}, {"prompt": 1}, {"prompt": "b", "max_tokens": 9}],
        parallel=1,
        watch=lambda batch, _tokens: said.append(progress_text(replace(batch.counts(), kv_share=0.37), 312.4, 60.0)),
    )
    assert said[0] == "0/3 done · 1 running · 2 waiting · 312 tok/s · K/V 37 %"
    assert said[-1] == "3/3 done · 1 failed · 0 running · 0 waiting · 312 tok/s · K/V 37 % · 0 s left"
    assert any("1 running · 0 waiting · 312 tok/s · K/V 37 % · 1 min 00 s left" in line for line in said)


CLOCK = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}}},
}


def test_calls_of_tools_are_results_in_either_form(model: LoadedModel) -> None:
    asked = {"messages": [{"role": "user", "content": "Time?"}], "tools": [CLOCK], "max_tokens": 200}
    lines: list[object] = [
        {**asked, "tool_choice": "required"},
        {"custom_id": "b", "body": {**asked, "tool_choice": {"type": "function", "function": {"name": "time"}}}},
        {**asked, "tool_choice": "none"},
    ]
    (plain, api, none), tally = run(model, lines, in_order=True)
    assert tally.failed == 0, tally.errors
    message = api["response"]["body"]["choices"][0]["message"]
    for found in (plain["tool_calls"], message["tool_calls"]):
        [call] = found
        assert call["function"]["name"] == "time"
        assert json.loads(call["function"]["arguments"]) in ({}, {"zone": "UTC"}, {"zone": "CET"})
    assert plain["finish_reason"] == api["response"]["body"]["choices"][0]["finish_reason"] == "tool_calls"
    assert (plain["text"], message["content"], none["tool_calls"]) == ("", None, [])
    answered = [*asked["messages"], message, {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}]
    (more,), tally = run(model, [{**asked, "messages": answered, "max_tokens": 3}])
    assert tally.failed == 0, tally.errors
    assert more["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"]


def test_thinking_is_reasoning_content_as_in_the_servers_form(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "thinking", context=512)
    template = folder / "chat_template.jinja"
    opening = "assistant\n<think>\n{% endif %}{# </think> #}"
    template.write_text(template.read_text().replace("assistant\n{% endif %}", opening))
    model = load_model(folder, name="thinking")
    asked = {"messages": [{"role": "user", "content": "Hi"}], "thinking": 3, "max_tokens": 24}
    plain, chat = run(model, [asked, {"custom_id": "a", "body": asked}], in_order=True)[0]
    body = chat["response"]["body"]
    message = body["choices"][0]["message"]
    thinking, _, content = plain["text"].partition("</think>")
    assert message == {
        "role": "assistant", "content": content.strip("\n"), "refusal": None,
        "reasoning_content": thinking.strip("\n"),
    }  # fmt: skip
    assert message["content"]
    assert message["reasoning_content"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_tags_of_a_model_that_does_not_think_are_content(model: LoadedModel) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "regex": "<think>a</think>b", "max_tokens": 40}
    (found,), _ = run(model, [{"custom_id": "a", "body": asked}])
    message = found["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>a</think>b", "refusal": None}


def test_log_probabilities_are_reported_in_the_api_form(model: LoadedModel) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    (found,), _ = run(model, [{"custom_id": "a", "body": asked}])
    reports = found["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [len(report["top_logprobs"]) for report in reports] == [2] * 4
    assert all(report["logprob"] == report["top_logprobs"][0]["logprob"] < 0 for report in reports)
