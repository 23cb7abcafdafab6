"""Prompt tokens beside decoding: as many as passes afford, whatever a single one of them took."""

import pytest

from headrace.runtime.engine.prompt_chunks import SMALLEST, STRETCH, ChunkBudget

STEP_S = 0.0041
TOKEN_S = 0.0002


def measured(passes: int = 20) -> ChunkBudget:
    """Fed with passes of four sequences, then with a prompt beside."""
    pace = ChunkBudget()
    pace.record(0, 512, 512 * TOKEN_S)
    for _ in range(passes):
        pace.record(4, 0, STEP_S)
    for _ in range(passes):
        fed = pace.budget(with_decoding=True)
        pace.record(4, fed, STEP_S + fed * TOKEN_S)
    return pace


def test_passes_have_as_many_prompt_tokens_as_the_time_limit_allows() -> None:
    fed = measured().budget(with_decoding=True)
    assert (STEP_S + fed * TOKEN_S) / STEP_S == pytest.approx(STRETCH, rel=0.1)


@pytest.mark.parametrize("rows", [0, 4])
def test_one_delayed_pass_does_not_change_the_budget(rows: int) -> None:
    pace = measured()
    before = pace.budget(with_decoding=True)
    pace.record(4, 0, 50 * STEP_S)
    pace.record(rows, 16, 50 * STEP_S)
    assert pace.budget(with_decoding=True) == before


def test_the_budget_follows_the_cost_of_tokens_and_the_batch_size() -> None:
    pace = measured()
    for _ in range(4):
        pace.record(4, 10, STEP_S + 10 * 2 * TOKEN_S)
    assert (STEP_S + pace.budget(with_decoding=True) * 2 * TOKEN_S) / STEP_S < STRETCH
    for _ in range(8):
        pace.record(8, 0, 3 * STEP_S)
    assert pace.budget(with_decoding=True) > 8


def test_the_budget_is_the_minimum_before_a_measurement() -> None:
    assert ChunkBudget().budget(with_decoding=True) == SMALLEST
