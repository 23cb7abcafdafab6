"""Merges of a vocabulary with scores."""

import itertools
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.models import BPE

from headrace.models.text import vocabulary as module
from headrace.models.text.vocabulary import BYTE, CONTROL, NORMAL, USER_DEFINED, Vocabulary, merges_by_score
from headrace.runtime.errors import CheckpointError

TEXTS = st.lists(st.text("ab é漢😀\0", max_size=6), min_size=1, max_size=30, unique=True)


def _plain_loop(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    usable = {text: index for index, text in enumerate(vocabulary.tokens) if vocabulary.kinds[index] == NORMAL}
    cuts = [(text, text[:cut], text[cut:]) for text in usable for cut in range(1, len(text))]
    merges = [
        (-scores[usable[whole]], usable[left], usable[right])
        for whole, left, right in cuts
        if left in usable and right in usable
    ]
    merges.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in merges]


def _examples(tokens: list[str], data: st.DataObject | None) -> tuple[Vocabulary, list[float]]:
    """Return a vocabulary of the tokens with drawn kinds and scores; without `data`, all of them the same."""
    if data is None:
        return Vocabulary(tokens, [NORMAL] * len(tokens)), [-1.0] * len(tokens)
    size = len(tokens)
    drawn = (NORMAL, NORMAL, NORMAL, CONTROL, USER_DEFINED, BYTE)
    kinds = data.draw(st.lists(st.sampled_from(drawn), min_size=size, max_size=size))
    scores = data.draw(st.lists(st.sampled_from((0.0, -0.0, -1.5, -2.0, 3.0)), min_size=size, max_size=size))
    return Vocabulary(tokens, kinds), scores


@given(TEXTS, st.data())
@example(["a", "aa", "aaa", "aaaa"], None)
def test_merges_are_splits_ordered_by_score(tokens: list[str], data: st.DataObject | None) -> None:
    vocabulary, scores = _examples(tokens, data)
    merges = list(merges_by_score(vocabulary, scores))
    kept = set(merges)
    assert merges == [merge for merge in _plain_loop(vocabulary, scores) if merge in kept]


@given(st.lists(st.text("abc", min_size=1, max_size=6), max_size=40, unique=True), st.data())
def test_merges_that_are_left_out_change_no_ids(longer: list[str], data: st.DataObject) -> None:
    vocabulary, scores = _examples([*"abc", *(text for text in longer if len(text) > 1)], data)
    chosen = BPE(vocab=vocabulary.ids(), merges=list(merges_by_score(vocabulary, scores)))
    every = BPE(vocab=vocabulary.ids(), merges=_plain_loop(vocabulary, scores))
    for text in data.draw(st.lists(st.text("abc", max_size=30), min_size=5, max_size=20)):
        assert [token.id for token in chosen.tokenize(text)] == [token.id for token in every.tokenize(text)]


def test_a_token_has_one_merge() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc", "aa", "aaa", "aaaa"]
    merges = list(merges_by_score(Vocabulary(tokens, [NORMAL] * len(tokens)), range(0, -len(tokens), -1)))
    assert merges == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a"), ("aa", "a"), ("aa", "aa")]


def test_a_long_token_keeps_all_its_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_EXAMINED", 2)
    vocabulary = Vocabulary(["a", "aa", "aaa", "aaaa"], [NORMAL] * 4)
    assert list(merges_by_score(vocabulary, [0.0] * 4)) == _plain_loop(vocabulary, [0.0] * 4)


def test_a_large_vocabulary_keeps_all_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(["a", "aa", "aaa", "aaaa"], [NORMAL] * 4)
    monkeypatch.setattr(module, "_MAX_EXAMINED", 10)
    assert list(merges_by_score(vocabulary, [0.0] * 4)) != _plain_loop(vocabulary, [0.0] * 4)
    monkeypatch.setattr(module, "_MAX_EXAMINED", 9)
    assert list(merges_by_score(vocabulary, [0.0] * 4)) == _plain_loop(vocabulary, [0.0] * 4)


def test_merges_take_few_bytes_for_each_character() -> None:
    tokens = ["".join(letters) for size in range(1, 13) for letters in itertools.product("ab", repeat=size)]
    characters = sum(map(len, tokens))
    vocabulary = Vocabulary(tokens, [NORMAL] * len(tokens))
    tracemalloc.start()
    try:
        merges_by_score(vocabulary, range(0, -len(tokens), -1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 160 * characters


def test_an_enormous_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 3)
    with pytest.raises(CheckpointError, match="4 characters"):
        merges_by_score(Vocabulary(["a", "b", "ab"], [NORMAL] * 3), [0.0] * 3)


def test_more_tokens_than_an_id_has_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ID_BITS", 1)
    with pytest.raises(CheckpointError, match="3 tokens"):
        merges_by_score(Vocabulary(["a", "b", "ab"], [NORMAL] * 3), [0.0] * 3)
