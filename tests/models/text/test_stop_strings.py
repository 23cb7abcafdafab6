"""The incremental matcher against `str.find` on the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.models.text.stop_strings import StopMatcher
from headrace.runtime.errors import UsageError

texts = st.text("ab\n<é", max_size=30)
stops_lists = st.lists(st.text("ab\n<é", min_size=1, max_size=5), max_size=4)


def cut_naively(text: str, stops: list[str]) -> tuple[str, bool]:
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


def cut_by_pieces(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        safe, stopped = matcher.feed(piece)
        shown += safe
        if stopped:
            return shown, True
    rest, stopped = matcher.flush()
    return shown + rest, stopped


@given(pieces=st.lists(texts, max_size=8), stops=stops_lists)
@example(pieces=["a", "b", "a", "b"], stops=["bab", "aba"])
@example(pieces=["ab", "b"], stops=["abba", "b"])
@example(pieces=["ab", "ba"], stops=["abba", "b"])
def test_any_split_gives_the_same_as_find(pieces: list[str], stops: list[str]) -> None:
    assert cut_by_pieces(pieces, stops) == cut_naively("".join(pieces), stops)


@given(text=texts, stops=stops_lists)
def test_only_possible_starts_of_a_stop_string_are_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, char in enumerate(text, start=1):
        safe, stopped = matcher.feed(char)
        shown += safe
        if stopped:
            return
        held = text[len(shown) : position]
        assert not held or any(stop.startswith(held) or stop in held for stop in stops)
        assert not any(stop in shown for stop in stops)


def test_text_without_a_stop_string_passes_at_once() -> None:
    assert StopMatcher([]).feed("anything") == ("anything", False)
    assert StopMatcher(["END"]).feed("anything") == ("anything", False)
    assert StopMatcher(["END"]).feed("the EN") == ("the ", False)


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("One. Two.") == ("One", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ("", True)


def test_the_stop_string_that_ended_a_text_is_known() -> None:
    matcher = StopMatcher(["later", "END"])
    assert matcher.feed("so EN") == ("so ", False)
    assert matcher.matched is None
    assert matcher.feed("D, not later") == ("", True)
    assert matcher.matched == "END"
    held = StopMatcher(["ab", "abc"])
    held.feed("xab")
    held.flush()
    assert held.matched == "ab"


def test_an_empty_stop_string_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(["x", ""])
