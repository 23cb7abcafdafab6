"""Answers as text for steps of several tokens: they end at the same token as with single tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.models.text.answer import AnswerText
from headrace.models.text.events import Completed, TextChunk
from headrace.models.text.thinking import read_tags
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.engine.request import Finished, FinishReason, Request, Step, TokenLogprobs
from headrace.runtime.metrics.telemetry import StepRecord
from tests.support.tiny_chat import write_chat_model


class Letters:
    """A tokenizer and its own stream: token 0 is "a", and so on."""

    def answer_stream(self, *_: object, **__: object) -> "Letters":
        return self

    def add(self, token: int) -> str:
        return chr(ord("a") + token)

    token_text = add

    def finish(self, *, cut: bool = False) -> str:  # noqa: ARG002
        return ""

    def decode(self, tokens: list[int], *, skip_special: bool) -> str:
        assert not skip_special
        return "".join(map(self.add, tokens))


def step(*tokens: int, ended: bool = False) -> Step:
    record = StepRecord(0, 9, 0.1, 1, 1, 1, 1, 1, 1, 1, proposed=6, accepted=len(tokens) - 1 + ended, source="ngram")
    return Step(tokens, record, tuple(TokenLogprobs(-float(token), []) for token in tokens))


def test_a_step_of_several_tokens_is_one_chunk() -> None:
    said = step(0, 1, 2)
    part = AnswerText(letters(), Request([1])).step(said)
    assert (part.text, part.step) == ("abc", said)
    assert (part.pieces, part.rejected) == (("a", "b", "c"), ())
    assert [(report.text, report.logprob) for report in part.reports] == [("a", 0.0), ("b", -1.0), ("c", -2.0)]


def test_a_token_within_a_character_is_reported_with_its_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_chat_model(tmp_path / "tiny"))
    tokens = tokenizer.encode("é!")
    record = StepRecord(0, 9, 0.1, 1, 1, 1, 1, 1, 1, 1)
    top = [(tokens[1], -1.0), (tokens[2], -2.0)]
    reports = AnswerText(tokenizer, Request([1])).step(Step((tokens[0],), record, (TokenLogprobs(-0.5, top),))).reports
    assert [(report.text, report.data, report.top_data) for report in reports] == [("\ufffd", b"\xc3", [b"\xa9", None])]


def test_a_chunk_has_the_texts_of_rejected_draft_tokens() -> None:
    part = AnswerText(letters(), Request([1]), ["zz"]).step(replace(step(0, 25), rejected=(3, 4)))
    assert (part.text, part.pieces, part.rejected) == ("a", ("a", ""), ("d", "e"))
    cut = AnswerText(letters(), Request([1]), ["b"]).step(replace(step(0, 1, 2), rejected=(3, 4)))
    assert (cut.pieces, cut.rejected) == (("a", ""), ()), "rejected behind the end"


@pytest.mark.parametrize("ended", [False, True])
def test_a_stop_string_ends_a_step_in_its_middle(ended: bool) -> None:
    request = Request([1])
    text = AnswerText(letters(), request, ["de"])
    text.step(step(0, 1))
    part = text.step(step(2, 3, 4, 5, 6, ended=ended))
    assert (part.text, part.step.tokens, part.step.record.tokens) == ("c", (2, 3, 4), 3)
    assert part.step.logprobs is not None
    assert len(part.step.logprobs) == 3
    assert (bool(request.cancel), request.cancel.after) == (True, 5)
    summary: Any = None
    end = text.end(Finished("cancelled", summary))
    assert (end.text, end.finished.reason, end.finished.stop_id, end.finished.stop_string) == ("", "stop", None, "de")


def test_a_stop_string_before_an_end_of_turn_leaves_that_out() -> None:
    part = AnswerText(letters(), Request([1]), ["c"]).step(step(1, 2, ended=True))
    assert (part.step.tokens, part.step.record.tokens) == ((1, 2), 2)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
@pytest.mark.parametrize("stops", [(), ("z",)])
def test_text_held_by_the_detokenizer_ends_the_answer(stops: tuple[str, ...], reason: FinishReason) -> None:
    class HalfCharacter(Letters):
        def finish(self, *, cut: bool = False) -> str:
            return "" if cut else "\ufffd"

    tokenizer: Any = HalfCharacter()
    tokenizer.answer_stream = lambda *_, **__: tokenizer
    text = AnswerText(tokenizer, Request([1]), stops)
    text.step(step(0))
    summary: Any = None
    end = text.end(Finished(reason, summary))
    assert (end.text, end.finished.reason) == ("\ufffd" if reason == "stop" else "", reason)


def letters() -> Any:
    return Letters()


@pytest.mark.parametrize("thinks", [False, True])
def test_a_stop_string_counts_after_the_thinking_only(thinks: bool) -> None:
    pieces = ["" if thinks else "<think>", "a stop", " here</thi", "nk>and ", "then st", "op. More"]
    tokenizer: Any = SimpleNamespace(decode=str, token_text=str)
    tokenizer.answer_stream = lambda *_, **__: SimpleNamespace(add=pieces.__getitem__, finish=lambda **_: "")
    text = AnswerText(tokenizer, Request([1]), ["stop"], thinks=thinks)
    said = ""
    for token in range(len(pieces)):
        part = text.step(step(token))
        said += part.text
    assert said == "".join(pieces).partition("</think>")[0] + "</think>and then "
    summary: Any = None
    end = text.end(Finished("cancelled", summary))
    assert (end.finished.stop_string, end.finished.ended_by) == ("stop", "stop_string")


@pytest.mark.parametrize("stops", [(), ("stop",)])
@pytest.mark.parametrize(
    ("thinks", "pieces", "tokens"),
    [
        (False, ["So", " it", " is"], 0),
        (False, ["<think>", "hm", "</think>", "So"], 3),
        (False, ["\n", "<th", "ink>h", "m</thi", "", "nk>So", " it"], 6),
        (False, ["<th", "e"], 0),
        (False, ["<th"], 0),
        (False, ["So", "<think>", "</think>"], 0),
        (False, ["<think>", "hm", " hm"], 3),
        (True, ["hm", "</think>", "So"], 2),
        (True, ["hm", " hm"], 2),
        (True, ["</think>", "</think>"], 1),
    ],
)
def test_parts_have_the_text_by_kind_and_thinking_tokens_are_those_up_to_the_closing_tag(
    stops: tuple[str, ...], thinks: bool, pieces: list[str], tokens: int
) -> None:
    tokenizer: Any = SimpleNamespace(decode=str, token_text=str)
    tokenizer.answer_stream = lambda *_, **__: SimpleNamespace(add=pieces.__getitem__, finish=lambda **_: "")
    answer = AnswerText(tokenizer, Request([1]), stops, thinks=thinks)
    summary: Any = None
    steps = [answer.step(step(token)) for token in range(len(pieces))]
    end = answer.end(Finished("length", summary))
    parts: list[TextChunk | Completed] = [*steps, end]
    assert end.finished.thinking_tokens == tokens
    assert "".join(part.text for part in parts) == "".join(pieces)
    whole = read_tags(("<think>" if thinks else "") + "".join(pieces))
    assert "".join(part.thinking for part in parts) == (whole.thinking or "")
    assert "".join(part.content for part in parts) == whole.content


def test_a_stop_string_does_not_count_in_half_a_closing_tag() -> None:
    tokenizer: Any = SimpleNamespace(decode=str, token_text=str)
    tokenizer.answer_stream = lambda *_, **__: SimpleNamespace(add=lambda _: "<think>hm</t", finish=lambda **_: "")
    answer = AnswerText(tokenizer, Request([1]), ["</t"])
    answer.step(step(0))
    summary: Any = None
    end = answer.end(Finished("length", summary))
    assert (end.text, end.thinking, end.content, end.finished.reason) == ("</t", "</t", "", "length")
