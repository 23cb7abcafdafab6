"""The first difference between a prompt and an earlier sequence, with the text around it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.answer.prompt_reuse import PromptReuse, ReuseLog
from headrace.models.text.prefix_difference import first_difference
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import CheckpointError
from headrace.runtime.kv.common_prefix import common_prefix
from tests.support.tiny_chat import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@given(st.lists(st.integers(0, 1), max_size=600), st.lists(st.integers(0, 1), max_size=600), st.integers(0, 600))
def test_the_common_prefix_is_the_longest(a: list[int], b: list[int], shared: int) -> None:
    b = a[:shared] + b
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def test_a_difference_has_its_place_and_the_text_of_both_sides(tokenizer: Tokenizer) -> None:
    earlier = tokenizer.encode("Answer in few words: why is the sky blue?")
    prompt = tokenizer.encode("Answer in few lines: why is the sea blue?")
    found = first_difference(earlier, prompt, tokenizer)
    assert found is not None
    assert found.position == common_prefix(earlier, prompt)
    assert (found.before, found.earlier, found.prompt) == ("swer in few ", "words: w", "lines: w")
    assert (found.earlier_token, found.prompt_token) == ("w", "l")
    assert found.document()["position"] == found.position
    assert first_difference(earlier, [*earlier, 1], tokenizer) is None
    assert first_difference(earlier, earlier[:3], tokenizer) is None
    assert first_difference([], prompt, tokenizer) is None
    hidden = [*earlier[:4], *tokenizer.encode("<|im_end|>", special=True)]
    found = first_difference(hidden, earlier, tokenizer)
    assert found is not None
    assert found.earlier_token == "<|im_end|>"
    accents = first_difference(tokenizer.encode("è!"), tokenizer.encode("é!"), tokenizer)
    assert accents is not None
    assert (accents.position, accents.before, accents.earlier, accents.prompt) == (1, "", "è!", "é!")


def test_a_prompt_is_compared_with_the_sequence_that_is_most_like_it(tokenizer: Tokenizer) -> None:
    log = ReuseLog(tokenizer)
    prompt = list(range(5, 45))
    assert log.explain(prompt, 0) == PromptReuse(0)
    log.answered([*prompt[:30], 1, 2, 3])
    log.answered([9, 9, 9])
    reuse = log.explain(prompt, 30)
    assert reuse.difference is not None
    assert (reuse.reused, reuse.dropped, reuse.difference.position) == (30, 0, 30)
    assert log.explain(prompt, 20).dropped == 10, "equal tokens that were not in the cache"
    log.answered(prompt)
    assert log.explain([*prompt, 1], 40) == PromptReuse(40)
    assert log.explain(prompt, 39) == PromptReuse(39), "the last token is fed by the first step"


def test_prefetched_tokens_are_those_computed_while_typing(tokenizer: Tokenizer) -> None:
    log = ReuseLog(tokenizer)
    prompt = list(range(5, 45))
    log.answered(prompt[:20])
    log.prefetched(prompt, 20, 30)
    log.prefetched(prompt, 30, 38)
    assert log.explain(prompt, 38).prefetched == 18
    assert log.explain([*prompt[:34], 1, 2, 3], 34).prefetched == 14, "the end was typed anew"
    assert log.explain([1, 2, 3], 0).prefetched == 0
    log.answered(prompt)
    assert log.explain([*prompt, 1, 2], 40).prefetched == 0


def test_a_tokenizer_that_fails_costs_the_text_alone() -> None:
    class Broken:
        def decode(self, *_: object, **__: object) -> str:
            raise CheckpointError("the tokenizer failed")

    log = ReuseLog(Broken())  # type: ignore[arg-type]
    log.answered([1, 2, 3])
    assert log.explain([1, 2, 4, 5], 1) == PromptReuse(1, dropped=1)
