"""Benchmark plans: tests, their order and their names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.bench.measure.plan import Test, parse_counts, plan
from headrace.runtime.errors import UsageError


def test_tests_are_planned_by_depth_then_kind() -> None:
    tests = plan([512], [128], [0, 2048], combined=True)
    assert [test.label for test in tests] == [
        "pp512", "tg128", "pp512+tg128", "pp512 @ d2048", "tg128 @ d2048", "pp512+tg128 @ d2048",
    ]  # fmt: skip


def test_a_length_of_zero_is_no_test() -> None:
    assert [test.name for test in plan([0], [16], [0], combined=True)] == ["tg16"]


@pytest.mark.parametrize(("prompts", "generates"), [([0], [0]), ([8], [1])])
def test_nothing_to_measure_is_refused(prompts: list[int], generates: list[int]) -> None:
    with pytest.raises(UsageError):
        plan(prompts, generates, [0], combined=True)


@given(st.lists(st.integers(0, 1 << 24), min_size=1))
def test_counts_are_read_back_each_once(counts: list[int]) -> None:
    assert parse_counts(",".join(map(str, counts)), "-p") == list(dict.fromkeys(counts))


@given(st.text(alphabet="0129,.- x", max_size=7))
def test_other_text_is_a_clear_error(text: str) -> None:
    if not re.fullmatch(r"( *\d{1,7} *)(, *\d{1,7} *)*", text):
        with pytest.raises(UsageError, match="-d"):
            parse_counts(text, "-d")
    else:
        assert all(0 <= count <= 1 << 24 for count in parse_counts(text, "-d"))


def test_each_test_has_a_kind() -> None:
    assert [Test(8, 0).kind, Test(0, 8).kind, Test(8, 8).kind] == ["prefill", "decode", "both"]


def test_a_prompt_joins_those_of_every_batch_or_four() -> None:
    tests = plan([8], [16], [0, 64], combined=True, batches=[1, 8], arrivals=[2048])
    assert tests[4].label == "pp2048 into tg64 x8"
    assert [test.kind for test in tests if test.batch > 1 and test.prompt] == ["arrival", "arrival"]
    assert [test.name for test in plan([0], [0], [0], combined=True, arrivals=[100])] == ["pp100 into tg64 x4"]


def test_batches_are_of_decodes_and_named_for_their_sequences() -> None:
    tests = plan([8], [16], [0, 64], combined=True, batches=[1, 4])
    assert [test.label for test in tests] == [
        "pp8", "tg16", "tg16 x4", "pp8+tg16", "pp8 @ d64", "tg16 @ d64", "tg16 x4 @ d64", "pp8+tg16 @ d64",
    ]  # fmt: skip
    assert tests[6].tokens > tests[5].tokens  # the first decode while the last are read in
    with pytest.raises(UsageError, match="--batch"):
        plan([], [16], [0], combined=False, batches=[0])
