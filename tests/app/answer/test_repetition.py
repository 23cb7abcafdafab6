"""Detection of answers that repeat themselves: exact, and not for text that only resembles itself."""

import random

import pytest

from headrace.app.answer.repetition import LONGEST_PERIOD, REPEATED, RepetitionDetector, period


def detected_after(tokens: list[int], step: int = 1) -> int | None:
    """Return the number of tokens after which the repetition is found, `step` tokens at a time."""
    repetition = RepetitionDetector()
    for at in range(0, len(tokens), step):
        repetition.add(tokens[at : at + step])
        if repetition.repeats:
            return min(at + step, len(tokens))
    return None


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("length", [1, 2, 4, 31, LONGEST_PERIOD])
def test_repetition_of_any_period_is_detected_soon(length: int, step: int) -> None:
    chance = random.Random(length)
    start = [chance.randrange(50) for _ in range(333)]
    loop = [1, 1, 2, 2] if length == 4 else [chance.randrange(50) for _ in range(length)]
    found = detected_after(start + (loop * 1000)[:1200], step)
    assert found is not None
    assert len(start) + REPEATED <= found <= len(start) + LONGEST_PERIOD + REPEATED + 64


def test_the_reported_period_of_a_repetition_is_the_shortest() -> None:
    assert period([9, *[1, 2, 1, 3] * 200]) == 4
    assert period([5] * (REPEATED + 1)) == 1
    assert period([5] * REPEATED) is None  # the first repeats nothing


def test_a_long_passage_is_no_loop() -> None:
    assert detected_after([*range(LONGEST_PERIOD + 1)] * 20) is None


def test_rows_that_differ_are_no_loop() -> None:
    rows = [token for row in range(400) for token in (1, 2, 100 + row, 2, 3, 3, 2, 4)]  # a table, a numbered list
    assert detected_after(rows) is None


def test_a_short_repetition_is_no_loop() -> None:
    wanted = [1, 2, 3, 4] * 100  # as if asked for
    assert detected_after([*wanted, *range(1000, 3000), *wanted]) is None


def test_the_repetition_detector_keeps_a_bounded_number_of_tokens() -> None:
    repetition = RepetitionDetector()
    repetition.add([*range(100_000)])
    repetition.add([*range(100_000)])
    assert len(repetition._tail) <= REPEATED + LONGEST_PERIOD
