"""Deltas of an answer: its text as stored, and the same by kind."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.app.engine.events import Delta
from headrace.app.engine.outbox import Outbox
from headrace.models.text.answer import AnswerText
from headrace.runtime.engine.request import Finished, Request, Step
from headrace.runtime.metrics.telemetry import StepRecord

RECORD = StepRecord(0, 9, 0.1, 1, 1, 1, 1, 1, 1, 1)


def deltas(pieces: list[str], *, thinks: bool, text_s: float = -1.0, opening: str = "") -> list[Delta]:
    """Return the deltas of an answer whose tokens complete these pieces."""
    tokenizer: Any = SimpleNamespace(token_text=str)
    tokenizer.answer_stream = lambda *_, **__: SimpleNamespace(add=pieces.__getitem__, finish=lambda **_: "")
    text = AnswerText(tokenizer, Request([1]), thinks=bool(opening), has_kinds=thinks)
    answer: Any = SimpleNamespace(prompt=SimpleNamespace(opening=opening), ttft_s=None)
    sent: list[Any] = []
    outbox = Outbox(1, answer, sent.append, text_s=text_s)
    summary: Any = None
    steps = [text.step(Step((token,), RECORD)) for token in range(len(pieces))]
    for part in (*steps, text.end(Finished("length", summary))):
        answer.ttft_s = 0.5 if part.text else answer.ttft_s
        outbox.add(part)
    outbox.flush()
    return sent


@pytest.mark.parametrize("text_s", [-1.0, 99.0])
def test_deltas_separate_thinking_from_content(text_s: float) -> None:
    sent = deltas(["hm", "\n</thi", "nk>\n", "\nSo"], thinks=True, text_s=text_s, opening="<think>\n")
    assert "".join(delta.text for delta in sent) == "<think>\nhm\n</think>\n\nSo"
    assert "".join(delta.thinking for delta in sent) == "hm"
    assert "".join(delta.content for delta in sent) == "So"


def test_all_text_of_a_model_that_does_not_think_is_content() -> None:
    sent = deltas(["<think>", "hm", "</think>"], thinks=False)
    assert "".join(delta.content for delta in sent) == "<think>hm</think>"
    assert not any(delta.thinking for delta in sent)


def test_an_incomplete_tag_at_the_end_counts_as_its_section() -> None:
    sent = deltas(["<think>hm", "</th"], thinks=True)
    assert [delta.thinking for delta in sent if delta.thinking] == ["hm", "</th"]
    assert "".join(delta.text for delta in sent) == "<think>hm</th"


def test_text_after_the_first_piece_is_sent_in_batches() -> None:
    sent = deltas(["a", "b", "c"], thinks=False, text_s=99.0)
    assert [delta.text for delta in sent] == ["a", "bc"]
