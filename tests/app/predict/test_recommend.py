"""Recommended models: the best of each use that fits two thirds of the memory and is fast enough."""

import json

import pytest
from msgspec.structs import replace

from headrace.app.predict.chip_names import chip_targets
from headrace.app.predict.document import catalog_fit
from headrace.app.predict.prediction import TargetMachine
from headrace.app.predict.recommend import (
    FASTEST_SHARE,
    MEMORY_SHARE,
    MIN_TOKENS_PER_SECOND,
    recommendations,
    uses_by_model,
)
from headrace.app.predict.uses import USES, legend
from headrace.app.predict.view import show_fit
from headrace.models.registry.catalog import load_catalog, ranked
from headrace.models.registry.resolve import DEFAULT_MODEL
from tests.support.commands import headrace

GIB = 1 << 30
LAPTOP = TargetMachine("a laptop", bandwidth=34e9, memory=20 * GIB, apple=False)


@pytest.mark.parametrize("target", [LAPTOP, *chip_targets("M4", 16), *chip_targets("M4 Max", 64)])
def test_a_recommended_model_is_the_first_by_rank_that_fits_and_is_fast_enough(target: TargetMachine) -> None:
    rows = {row["model"]: row for row in catalog_fit(target, 4096)["models"]}
    chosen = recommendations(target)
    assert chosen.keys() == USES.keys()
    for use in ("chat", "code"):
        good = [entry.name for entry in ranked(use) if _is_good(rows[entry.name], target)]
        assert chosen[use].name == good[0]
        assert use in rows[good[0]]["recommended_for"]
        assert chosen[use].download_bytes == load_catalog()[good[0]].download_bytes
        assert chosen[use].tokens_per_second == pytest.approx(rows[good[0]]["expected"] or rows[good[0]]["roofline"])


@pytest.mark.parametrize("target", [LAPTOP, *chip_targets("M4", 16), *chip_targets("M4 Max", 64)])
def test_the_fastest_model_has_a_fifth_of_the_best_score(target: TargetMachine) -> None:
    chosen = recommendations(target)
    least = load_catalog()[chosen["chat"].name].score * FASTEST_SHARE
    rows = {row["model"]: row for row in catalog_fit(target, 4096)["models"]}
    able = [entry.name for entry in ranked("chat") if entry.score >= least and _is_good(rows[entry.name], target)]
    assert chosen["fastest"].name == max(able, key=lambda name: rows[name]["expected"] or rows[name]["roofline"])


def test_the_sample_model_is_never_recommended() -> None:
    tiny = replace(LAPTOP, memory=load_catalog()[DEFAULT_MODEL].memory_bytes(4096) * 2)
    assert DEFAULT_MODEL not in {model.name for model in recommendations(tiny).values()}


def _is_good(row: dict, target: TargetMachine) -> bool:
    assert target.memory is not None
    speed = row["expected"] if row["expected"] is not None else row["roofline"]
    return row["memory"] <= target.memory * MEMORY_SHARE and speed >= MIN_TOKENS_PER_SECOND


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
