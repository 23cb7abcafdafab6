"""Tokens of a thinking section, by the text that each one completes."""

import pytest

from headrace.app.answer.answer import ThinkingCount
from headrace.models.text.thinking import split_thinking


@pytest.mark.parametrize(
    ("thinking", "pieces", "tokens"),
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
def test_tokens_up_to_the_closing_tag(thinking: bool, pieces: list[str], tokens: int) -> None:
    count = ThinkingCount(thinking=thinking)
    for piece in pieces:
        count.add([piece])
    count.finish()
    assert count.tokens == tokens
    whole = split_thinking(("<think>" if thinking else "") + "".join(pieces))
    assert (whole.thinking is not None) == (tokens > 0)
