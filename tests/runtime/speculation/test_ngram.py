"""N-gram draft tokens: the longest recent match wins, found by an index of bounded cost."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.speculation.acceptance import GREEDY_PRIOR, LONGEST, Acceptance
from headrace.runtime.speculation.ngram import END, MAX_RECENT, NGram, RecentAnswers, Suffixes


def after(tokens: Sequence[int], count: int = 3) -> list[int]:
    proposer = NGram()
    proposer.update(tokens)
    return list(proposer.propose(count))


def test_the_continuation_of_a_match_is_drafted() -> None:
    assert after([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]


def test_no_draft_without_a_match() -> None:
    for tokens in ([], [1], [1, 1], [1, 2, 3, 4], [1, 2, 3, 2]):
        proposer = NGram()
        proposer.update(tokens)
        assert (list(proposer.propose(3)), list(proposer.chances(3))) == ([], [])


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert after([9, 1, 2, 7, 7, 8, 1, 2, 5, 5, 9, 1, 2], 1) == [7]  # 9 1 2 is longer than 1 2
    assert after([8, 1, 2, 7, 9, 1, 2, 5, 6, 1, 2], 1) == [5]


def test_a_periodic_text_is_continued() -> None:
    assert after([1, 2, 3, 1, 2, 3, 1], 8) == [2, 3, 1, 2, 3, 1, 2, 3]


def longest(tokens: Sequence[int]) -> int:
    """Return the longest match of the end with a continuation, by brute force."""
    best = 0
    for at in range(2, len(tokens)):
        length = 0
        while length < min(at, LONGEST) and tokens[at - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, length)
    return best


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60))
def test_matches_equal_brute_force(tokens: list[int], first: int) -> None:
    """Within the latest few occurrences of a pair; updated in pieces or at once."""
    proposer = NGram()
    text = tokens[:first]
    proposer.update(text)
    for token in tokens[first:]:
        text.append(token)
        proposer.update(text)
    best = longest(text)
    found = proposer._length
    if proposer._next and not found:  # it goes on behind a token that differs
        return
    assert bool(proposer.chances(1)) == (best >= 2)
    if best < 2:
        return
    at = proposer._next
    length = found
    differ = sum(a != b for a, b in zip(text[at - length : at], text[len(text) - length :], strict=True))
    assert differ <= 1
    assert length <= max(best, len(text))
    if not differ and len(text) < 16:  # few enough that all are looked at
        assert min(length, LONGEST) == best


def test_a_draft_resumes_after_a_replaced_token() -> None:
    page = list(range(10, 40))
    proposer = NGram()
    text = [*page, 1, 2, *page[:12]]
    proposer.update(text)
    text.append(7)  # in place of page[12]
    proposer.update(text)
    assert list(proposer.propose(3)) == page[13:16]
    first = proposer.chances(3)
    text.append(page[13])
    proposer.update(text)
    assert list(proposer.propose(2)) == page[14:16]
    assert proposer.chances(1)[0] > first[0]
    text.append(8)
    proposer.update(text)
    assert list(proposer.propose(2)) == []  # it was not a copy after all


def test_draft_tokens_have_lower_acceptance_estimates_in_sampled_text() -> None:
    chances = []
    for drawn in (False, True):
        proposer = NGram(sampled=drawn)
        proposer.update([1, 2, 3, 4, 5, 6, 1, 2, 3])
        chances.append(proposer.chances(3))
    assert all(more > less for more, less in zip(*chances, strict=True))


def test_accepted_draft_tokens_raise_acceptance_estimates() -> None:
    proposer = NGram()
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    proposer.update(text)
    before = list(proposer.chances(4))
    for token in [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3:
        text.append(token)
        proposer.update(text)
    assert all(later > first for later, first in zip(proposer.chances(4), before, strict=True))


def test_acceptance_estimates_follow_recent_rates() -> None:
    chance = random.Random(1)
    found = Acceptance(GREEDY_PRIOR)
    for rate in (0.9, 0.1):
        for _ in range(300):
            found.record(5, chance.random() < rate)
        assert abs(found.chance(5) - rate) < 0.2
    assert 0 < found.chance(500) < 1


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=10), st.integers(1, 4))
def test_indexed_matches_equal_brute_force(text: list[int], end: list[int], width: int) -> None:
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
