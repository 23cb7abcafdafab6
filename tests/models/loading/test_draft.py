"""A draft model needs the target's vocabulary; the error names the first difference."""

from typing import Any

import pytest

from headrace.models.loading.draft import check_same_vocabulary
from headrace.runtime.errors import UsageError


class Words:
    """As much of a tokenizer as is asked."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def vocabulary(self) -> dict[int, str]:
        return dict(enumerate(self._words))


def check(ours: Any, theirs: Any) -> None:
    check_same_vocabulary(ours, theirs, "small")


def test_a_draft_model_with_the_same_vocabulary_is_accepted() -> None:
    check(Words("a", "b"), Words("a", "b"))


@pytest.mark.parametrize(
    ("theirs", "token"),
    [
        (Words("a", "c", "d"), "token 1 .*'c'.*'b'"),
        (Words("a"), "token 1 .*None.*'b'"),
        (Words("a", "b", "c"), "token 2 .*'c'.*None"),
    ],
)
def test_a_draft_model_with_another_vocabulary_is_refused(theirs: Words, token: str) -> None:
    with pytest.raises(UsageError, match=f"small.*{token}") as refused:
        check(Words("a", "b"), theirs)
    assert "vocabulary" in str(refused.value.hint)
