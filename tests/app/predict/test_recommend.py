"""Recommended models: the best of each rank that fits half the memory and is fast enough."""

import json

import pytest
from msgspec.structs import replace

from headrace.app.predict.chip_names import chip_targets
from headrace.app.predict.document import catalog_fit
from headrace.app.predict.prediction import TargetMachine
from headrace.app.predict.recommend import (
    LEAST_TOKENS_PER_SECOND,
    MEMORY_SHARE,
    recommendations,
    uses_by_model,
)
from headrace.app.predict.uses import USES, legend
from headrace.app.predict.view import show_fit
from headrace.models.registry.catalog import load_catalog, load_ranks
from headrace.models.registry.resolve import DEFAULT_MODEL
from tests.support.commands import headrace

GIB = 1 << 30
LAPTOP = TargetMachine("a laptop", bandwidth=34e9, memory=20 * GIB, apple=False)


def test_ranks_list_catalog_models_once_without_the_sample_model() -> None:
    ranks = load_ranks()
    assert ranks.keys() == USES.keys()
    for names in ranks.values():
        assert len({*names}) == len(names)
        assert {*names} <= load_catalog().keys() - {DEFAULT_MODEL}


@pytest.mark.parametrize("target", [LAPTOP, *chip_targets("M4", 16), *chip_targets("M4 Max", 64)])
def test_a_recommended_model_is_the_first_of_its_rank_that_fits_and_is_fast_enough(target: TargetMachine) -> None:
    rows = {row["model"]: row for row in catalog_fit(target, 4096)["models"]}
    chosen = recommendations(target)
    assert chosen.keys() == load_ranks().keys()
    for use, names in load_ranks().items():
        good = [name for name in names if _is_good(rows[name], target)]
        assert chosen[use].name == good[0]
        assert use in rows[good[0]]["recommended_for"]
        assert chosen[use].download_bytes == load_catalog()[good[0]].download_bytes
        assert chosen[use].tokens_per_second == pytest.approx(rows[good[0]]["expected"] or rows[good[0]]["roofline"])


def _is_good(row: dict, target: TargetMachine) -> bool:
    assert target.memory is not None
    speed = row["expected"] if row["expected"] is not None else row["roofline"]
    return row["memory"] <= target.memory * MEMORY_SHARE and speed >= LEAST_TOKENS_PER_SECOND


def test_a_machine_too_slow_or_too_small_has_no_recommendation() -> None:
    assert recommendations(replace(LAPTOP, bandwidth=1e8)) == {}
    assert recommendations(replace(LAPTOP, memory=GIB // 8)) == {}
    assert recommendations(replace(LAPTOP, memory=None)) == {}
    assert legend({}) == ""


def test_one_model_may_have_several_uses() -> None:
    chosen = recommendations(LAPTOP)
    uses = uses_by_model(chosen)
    assert sorted(use for its_uses in uses.values() for use in its_uses) == sorted(chosen)
    assert legend(uses).startswith(f"★ best chat: {chosen['chat'].name} · best for code: ")


def test_fit_marks_recommended_models(capsys: pytest.CaptureFixture[str]) -> None:
    show_fit(catalog_fit(LAPTOP, 4096))
    printed = capsys.readouterr().out
    chosen = recommendations(LAPTOP)
    assert f"{chosen['chat'].name} ★" in printed
    assert f"★ best chat: {chosen['chat'].name}" in printed


def test_list_shows_the_uses_of_each_model() -> None:
    rows = json.loads(headrace("list", "--json", code=0).stdout)
    assert all({*row["recommended_for"]} <= USES.keys() for row in rows if not row.get("program"))
