"""Matches of a text's end: against brute force, in recent answers, with votes, in bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.speculation.acceptance import LONGEST
from headrace.runtime.speculation.ngram import NGram
from headrace.runtime.speculation.suffixes import END, MAX_RECENT, RecentAnswers, Suffixes


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=10), st.integers(1, 4))
def test_matches_equal_brute_force(text: list[int], end: list[int], width: int) -> None:
    suffixes = Suffixes(width)
    for start in range(0, len(text), 7):
        suffixes.append(text[start : start + 7])
    expected = []
    for position in range(len(text) - 1, width - 1, -1):  # those with a continuation
        length = 0
        while length < min(position, len(end), LONGEST) and text[position - 1 - length] == end[-1 - length]:
            length += 1
        if length >= width:
            expected.append((position, length))
    found = [(position, length) for _, position, length in suffixes.matches(end)]
    assert found == expected[:8]


def proposer(recent: RecentAnswers, tokens: list[int]) -> NGram:
    ngram = NGram(recent=recent)
    ngram.update(tokens)
    return ngram


def test_an_answer_of_another_sequence_is_drafted_up_to_its_end() -> None:
    recent = RecentAnswers()
    answer = list(range(100, 120))
    recent.add(answer)
    assert list(proposer(recent, [1, 2, *answer[:7]]).propose(5)) == answer[7:12]
    assert list(proposer(recent, [1, 2, *answer[:17]]).propose(9)) == answer[17:]
    assert list(proposer(recent, [1, 2, *answer]).propose(3)) == []
    assert list(proposer(recent, [1, 2, *answer[:5]]).propose(3)) == []  # too short to tell


def test_a_draft_beyond_an_answers_end_is_dropped() -> None:
    recent = RecentAnswers()
    answer = list(range(100, 120))
    recent.add(answer)
    recent.add(list(range(30)))
    text = [1, 2, *answer[:17]]
    ngram = proposer(recent, text)
    for token in (*answer[17:], 55):
        text.append(token)
        ngram.update(text)
    assert not ngram.chances(1)


def test_the_most_frequent_continuation_is_drafted() -> None:
    once = [1, 2, 3, 7]
    often = [1, 2, 3, 5]
    text = [*often, 20, *often, 21, *often, 22, *once, 23, 1, 2, 3]
    assert list(proposer(RecentAnswers(), text).propose(1)) == [5]


def test_recent_answers_are_bounded() -> None:
    recent = RecentAnswers()
    for number in range(40):
        recent.add([number % 7] * 5000)
    recent.add(range(2 * MAX_RECENT))
    held = [texts.tokens for texts in (recent._newer, recent._older)]
    assert sum(len(tokens) for tokens in held) <= MAX_RECENT
    assert held[0][-2:] == [2 * MAX_RECENT - 1, END]
