"""Separation of streamed text gives the parts of the whole text, however it was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.server.parts import PartSplitter
from headrace.models.text.thinking import split_thinking

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "think>", "\n", " ", "a", "b", "<"]))


def split(pieces: list[str], *, thinks: bool = True) -> tuple[str, str]:
    splitter = PartSplitter(thinks=thinks)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    assert all(part.text for part in parts)
    texts = {"reasoning": "", "content": ""}
    for part in parts:
        texts[part.kind] += part.text
    return texts["reasoning"], texts["content"]


@given(PIECES)
def test_parts_are_those_of_the_whole_text(pieces: list[str]) -> None:
    whole = split_thinking("".join(pieces))
    assert split(pieces) == (whole.thinking or "", whole.answer)


@given(PIECES)
def test_without_thinking_all_text_is_the_answer(pieces: list[str]) -> None:
    assert split(pieces, thinks=False) == ("", "".join(pieces))


@pytest.mark.parametrize(
    ("held", "certain"), [("<thi", []), ("<think>a</th", ["a"]), ("<think>a\n", ["a"]), ("<think>\n", [])]
)
def test_only_what_may_be_a_tag_is_held_back(held: str, certain: list[str]) -> None:
    assert [part.text for part in PartSplitter(thinks=True).feed(held)] == certain
