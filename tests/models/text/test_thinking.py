"""Splitting thinking from answers, whole and while it grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.thinking import CLOSE, OPEN, Parts, ThinkingSplitter, ThinkingTags, split_thinking

pieces = st.lists(st.sampled_from([OPEN, CLOSE, "<", "</", "think>", "a", "\n", " ", "é", "x < y"]), max_size=12)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", Parts(None, "")),
        ("Just an answer.", Parts(None, "Just an answer.")),
        ("<think>\nhm\n</think>\n\nYes.", Parts("hm", "Yes.")),
        ("\n<think>hm</think>Yes.", Parts("hm", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", Parts("", "Yes.")),
        ("<think>hm", Parts("hm", "", is_open=True)),
        ("Say <think>no</think>.", Parts(None, "Say <think>no</think>.")),
        ("<think>a</think>b<think>c</think>", Parts("a", "b<think>c</think>")),
        ("<thinker>", Parts(None, "<thinker>")),
        ("<thi", Parts(None, "<thi")),
    ],
)
def test_whole_texts_are_split_into_thinking_and_answer(text: str, parts: Parts) -> None:
    assert split_thinking(text) == parts


@given(pieces)
def test_emitted_parts_of_a_growing_text_are_final(parts: list[str]) -> None:
    text = "".join(parts)
    last = Parts(None, "")
    for end in range(len(text) + 1):
        now = split_thinking(text[:end], growing=True)
        assert now.answer.startswith(last.answer)
        assert (now.thinking or "").startswith((last.thinking or "").rstrip("\n"))
        assert last.thinking is None or now.thinking is not None
        last = now
    whole = split_thinking(text)
    assert whole.answer.startswith(last.answer)
    assert len(whole.answer) - len(last.answer) < len(OPEN)


def test_a_partial_tag_is_held_back() -> None:
    assert split_thinking("<thi", growing=True) == Parts(None, "")
    assert split_thinking("<think>hm</thi", growing=True) == Parts("hm", "", is_open=True)
    assert split_thinking("<think>hm</thi") == Parts("hm</thi", "", is_open=True)


@given(
    st.lists(st.sampled_from([*"<>/ \n.", "think", OPEN, CLOSE, "stop"]), max_size=12).map("".join),
    st.booleans(),
    st.integers(1, 7),
)
def test_a_splitter_gives_the_parts_of_the_whole_text_in_pieces_of_any_size(text: str, thinks: bool, size: int) -> None:
    splitter = ThinkingSplitter(thinks=thinks)
    section = ""
    content = ""
    thinking = ""
    answer = ""
    for start in range(0, len(text) + size, size):  # the last piece is empty
        piece = text[start : start + size]
        new_section, new_content = splitter.feed(piece) if piece else splitter.finish(piece)
        assert not (new_section and content)
        section += new_section
        content += new_content
        new_thinking, new_answer = splitter.without_tags(new_section, new_content)
        thinking += new_thinking
        answer += new_answer
    assert section + content == text
    assert CLOSE not in section.removesuffix(CLOSE)
    assert splitter.has_section == (thinks or text.lstrip().startswith(OPEN))
    whole = split_thinking((OPEN if thinks else "") + text)
    assert (thinking, answer) == (whole.thinking or "", whole.answer)


@pytest.mark.parametrize(
    ("text", "thinking"), [("<thi", ""), ("<think>a</th", "a"), ("<think>a\n", "a"), ("<think>\n", "")]
)
def test_only_text_that_may_be_dropped_is_held_back(text: str, thinking: str) -> None:
    splitter = ThinkingSplitter()
    assert splitter.without_tags(*splitter.feed(text)) == (thinking, "")


@pytest.mark.parametrize("pieces", [[("hm", ""), ("m", "S"), ("", "o.")], [("hm", "")], [("", "So.")]])
def test_tags_around_thinking_are_found_again(pieces: list[tuple[str, str]]) -> None:
    tags = ThinkingTags()
    text = "".join(tags.add(thinking, content) for thinking, content in pieces)
    thinking = "".join(thinking for thinking, _ in pieces)
    content = "".join(content for _, content in pieces)
    assert split_thinking(text) == Parts(thinking or None, content, is_open=not content)
