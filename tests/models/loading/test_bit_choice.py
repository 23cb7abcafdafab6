"""The choice of formats keeps its budget and is close to the best one."""

import random
from collections.abc import Sequence
from itertools import product

import pytest

from headrace.models.checkpoint.quantization import Groups
from headrace.models.loading.bit_choice import PartFormat, choose


def random_parts(seed: int) -> list[list[PartFormat]]:
    """Four parts with four formats each: a width halves the error per bit, unevenly."""
    draw = random.Random(seed)
    parts = []
    for _ in range(4):
        weights = draw.randint(1, 9) * 100
        kl = draw.uniform(0.001, 1.0)
        parts.append(
            [
                PartFormat(Groups(bits, 64), weights * bits // 8, kl * 4.0**-bits * draw.uniform(0.8, 1.25))
                for bits in (2, 3, 4, 8)
            ]
        )
    return parts


def least_bytes(parts: Sequence[Sequence[PartFormat]]) -> int:
    return sum(min(option.nbytes for option in options) for options in parts)


def total_kl(chosen: list[PartFormat]) -> float:
    return sum(option.kl for option in chosen)


@pytest.mark.sampled(always=["56"])  # a choice that leaves no byte of its budget
@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_within_its_budget_and_cannot_be_improved(seed: int) -> None:
    parts = random_parts(seed)
    least = least_bytes(parts)
    most = sum(max(option.nbytes for option in options) for options in parts)
    budget = random.Random(seed).randint(least, most)
    chosen = choose(parts, budget)
    used = sum(option.nbytes for option in chosen)
    assert used <= budget
    for now, options in zip(chosen, parts, strict=True):
        assert not [option for option in options if option.kl < now.kl and used - now.nbytes + option.nbytes <= budget]
    best = min(total_kl(list(each)) for each in product(*parts) if sum(option.nbytes for option in each) <= budget)
    assert best <= total_kl(chosen)


def test_the_divergence_is_at_most_twice_the_optimum() -> None:
    for seed in range(60):
        parts = random_parts(seed)
        least = least_bytes(parts)
        chosen = choose(parts, least + 300)
        used = sum(option.nbytes for option in chosen)
        best = min(total_kl(list(each)) for each in product(*parts) if sum(option.nbytes for option in each) <= used)
        assert total_kl(chosen) <= best * 2


def test_the_smallest_budget_takes_the_smallest_formats() -> None:
    parts = random_parts(0)
    assert [option.groups.bits for option in choose(parts, least_bytes(parts))] == [2] * 4
