"""Thinking and content of answers, whole and while they grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.thinking import CLOSE, NO_TEXT, OPEN, Kinds, ThinkingSplitter, read_tags


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("", None, ""),
        ("Just an answer.", None, "Just an answer."),
        ("<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("\n<think>hm</think>Yes.", "hm", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>hm", "hm", ""),
        ("<think>\nhm\n", "hm", ""),
        ("<think>hm</thi", "hm</thi", ""),
        ("Say <think>no</think>.", None, "Say <think>no</think>."),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<thinker>", None, "<thinker>"),
        ("<thi", None, "<thi"),
    ],
)
def test_tags_tell_thinking_and_content(text: str, thinking: str | None, content: str) -> None:
    read = read_tags(text)
    assert (read.text, read.thinking, read.content) == (text, thinking, content)
    assert read.is_open == (thinking is not None and CLOSE not in text)
    assert sum(read.kinds) == len(text)


@given(
    st.lists(st.sampled_from([*"<>/ \n.", "think", OPEN, CLOSE, "stop"]), max_size=12).map("".join),
    st.booleans(),
    st.integers(1, 7),
)
def test_a_splitter_gives_the_kinds_of_the_whole_text_in_pieces_of_any_size(text: str, thinks: bool, size: int) -> None:
    opening = OPEN if thinks else ""
    splitter = ThinkingSplitter(thinks=thinks)
    written = NO_TEXT.grown(opening, Kinds(len(opening)))
    for start in range(0, len(text) + size, size):  # the last piece is empty
        piece = text[start : start + size]
        section, content = splitter.feed(piece) if piece else splitter.finish(piece)
        assert not (section and written.content)
        before = written
        parts = splitter.by_kind(section, content)
        written = written.grown(piece, Kinds(*map(len, parts)))
        assert (written.thinking or "").startswith(before.thinking or "")
        assert (written.thinking or "").endswith(parts[1])
        assert written.content == before.content + parts[3]
    assert splitter.has_section == (thinks or text.lstrip().startswith(OPEN))
    whole = read_tags(opening + text)
    assert written.ended() == whole
    assert (written.thinking, written.content) == (whole.thinking, whole.content)


@given(st.lists(st.sampled_from(["a", "\n", CLOSE, "b\n"]), max_size=8), st.integers(0, 8))
def test_a_section_that_is_continued_has_the_kinds_of_the_whole_text(pieces: list[str], cut: int) -> None:
    begun = read_tags(OPEN + "".join(pieces[:cut]))
    if not begun.is_open:
        return
    rest = "".join(pieces[cut:])
    splitter = ThinkingSplitter(thinks=True)
    continued = begun.grown(rest, Kinds(*map(len, splitter.by_kind(*splitter.finish(rest))))).ended()
    whole = read_tags(begun.text + rest)
    assert (continued.thinking, continued.content) == (whole.thinking, whole.content)


@pytest.mark.parametrize(
    ("text", "thinking"), [("<thi", ""), ("<think>a</th", "a"), ("<think>a\n", "a"), ("<think>\n", "")]
)
def test_only_a_possible_tag_is_held_back_within_thinking(text: str, thinking: str) -> None:
    splitter = ThinkingSplitter()
    _, known, _, content = splitter.by_kind(*splitter.feed(text))
    assert (known, content) == (thinking, "")
