"""Gains of speculative decoding against arithmetic by hand."""

import pytest
from msgspec.structs import replace

from headrace.app.predict.acceptance import DRAFT_LENGTHS, best_draft, break_even, tokens_per_step
from headrace.app.predict.document import acceptance_prediction
from headrace.app.predict.prediction import TargetMachine, verifying_seconds
from headrace.app.predict.view import show_acceptance
from headrace.models.registry.catalog import find

SHAPE = find("llama-3.1-8b").step_shape
CHIP = TargetMachine("chip", 100e9, 10 * 2**30, apple=True)


def test_a_step_emits_accepted_tokens_and_one_more() -> None:
    assert tokens_per_step(0.0, 4) == 1
    assert tokens_per_step(1.0, 4) == 5
    assert tokens_per_step(0.5, 2) == 1.75
    assert tokens_per_step(0.8, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))


def test_break_even_is_where_tokens_per_step_equal_its_relative_cost() -> None:
    assert break_even(1.0, 3) == 0.0
    assert break_even(1.25, 1) == pytest.approx(0.25)
    assert break_even(5.0, 4) == pytest.approx(1.0)
    assert break_even(5.01, 4) is None
    for guesses in DRAFT_LENGTHS:
        chance = break_even(1.4, guesses)
        assert chance is not None
        assert tokens_per_step(chance, guesses) == pytest.approx(1.4)


def test_the_best_number_of_draft_tokens() -> None:
    costs = {1: 1.1, 4: 1.3, 15: 3.0}
    assert best_draft(costs, 0.05) == (0, 1.0)
    assert best_draft(costs, 0.7) == (4, pytest.approx(tokens_per_step(0.7, 4) / 1.3))
    assert best_draft(costs, 1.0)[0] == 15


def test_a_step_with_draft_tokens_reads_the_weights_once() -> None:
    chip = replace(CHIP, apple=False)  # without published figures: the time of reading alone
    alone, expected = verifying_seconds(SHAPE, chip, 1000, 0)
    assert not expected
    assert alone == pytest.approx((SHAPE.cost.weight_bytes + 1001 * 131072 + 131072) / 100e9)
    five, _ = verifying_seconds(SHAPE, chip, 1000, 4)
    assert five - alone == pytest.approx((4 + 4) * 131072 / 100e9)  # four more entries read, and written
    slow, _ = verifying_seconds(SHAPE, replace(chip, flops=1e12), 1000, 4)
    assert slow - five == pytest.approx(sum(SHAPE.cost.step_flops(1000 + row) for row in (1, 2, 3, 4)) / 1e12)


def test_the_document_has_the_gain_of_each_acceptance() -> None:
    unsupported = replace(CHIP, name="other", apple=False, flops=2e12)
    known = replace(CHIP, flops=1e15)
    document = acceptance_prediction("x", SHAPE, [known, unsupported], 1000, 0.7)
    chip, other = document["targets"]
    assert chip["is_expected"]
    assert not other["is_expected"]
    assert [row["guesses"] for row in chip["guesses"]] == list(DRAFT_LENGTHS)
    assert chip["gain"] == max(row["gain"] for row in chip["guesses"])
    assert other["gain"] < chip["gain"]
    assert other["tokens_per_second_guessing"] == pytest.approx(other["gain"] * other["tokens_per_second"])
    never = acceptance_prediction("x", SHAPE, [unsupported], 1000, 0.0)["targets"][0]
    assert (never["best"], never["gain"]) == (0, 1.0)


def test_no_gain_is_predicted_without_known_flops(capsys: pytest.CaptureFixture[str]) -> None:
    document = acceptance_prediction("x", SHAPE, [CHIP], 1000, 0.7)
    (chip,) = document["targets"]
    assert chip["tokens_per_second"] > 0
    assert (chip["gain"], chip["best"], chip["tokens_per_second_guessing"], chip["guesses"]) == (None, None, None, [])
    show_acceptance(document)
    assert "3.32x" not in capsys.readouterr().out
