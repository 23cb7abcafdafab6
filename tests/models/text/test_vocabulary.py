"""Merges of a vocabulary with scores."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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


@given(TEXTS, st.data())
@example(["a", "aa", "aaa", "aaaa"], None)
def test_merges_are_all_splits_ordered_by_score(tokens: list[str], data: st.DataObject | None) -> None:
    kinds = [NORMAL] * len(tokens)
    scores = [-1.0] * len(tokens)
    if data is not None:
        size = len(tokens)
        kinds = data.draw(
            st.lists(st.sampled_from((NORMAL, CONTROL, USER_DEFINED, BYTE)), min_size=size, max_size=size)
        )
        scores = data.draw(st.lists(st.sampled_from((0.0, -0.0, -1.5, -2.0, 3.0)), min_size=size, max_size=size))
    vocabulary = Vocabulary(tokens, kinds)
    assert list(merges_by_score(vocabulary, scores)) == _plain_loop(vocabulary, scores)


def test_an_enormous_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 3)
    with pytest.raises(CheckpointError, match="4 characters"):
        merges_by_score(Vocabulary(["a", "b", "ab"], [NORMAL] * 3), [0.0] * 3)


def test_more_tokens_than_an_id_has_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ID_BITS", 1)
    with pytest.raises(CheckpointError, match="3 tokens"):
        merges_by_score(Vocabulary(["a", "b", "ab"], [NORMAL] * 3), [0.0] * 3)
