"""Predictions: against what others measured on Macs, and against arithmetic by hand."""

from dataclasses import replace
from statistics import median

import pytest

from headrace.app.predict.document import catalog_fit, explanation, prediction
from headrace.app.predict.fit_store import MeasuredFit
from headrace.app.predict.prediction import (
    Target,
    chip_target,
    known_targets,
    largest_context,
    levers,
    predict,
    summarise_assumptions,
)
from headrace.app.predict.published import Assumptions, PublishedPoint, assumptions, error, points
from headrace.models.cost.costs import WORKING_MEMORY
from headrace.models.cost.shape_sources import shape_of_entry
from headrace.models.registry.catalog import find
from headrace.runtime.errors import UsageError

ENGINES = ("mlx-lm", "llama.cpp")
SHAPE = shape_of_entry(find("llama-3.1-8b"))


def of(engine: str) -> list[PublishedPoint]:
    return [point for point in points() if point.engine == engine]


def fitted(known: list[PublishedPoint]) -> Assumptions:
    """The two constants by least squares of the relative error, over a grid as fine as the file's figures."""
    candidates = [
        Assumptions("", efficiency / 100, layer * 5e-6) for efficiency in range(70, 100) for layer in range(4, 50)
    ]
    return min(candidates, key=lambda assumed: sum(error(point, assumed) ** 2 for point in known))


def test_there_are_enough_points_on_enough_chips_with_sources() -> None:
    assert len(of("mlx-lm")) >= 12
    assert len({(point.chip, point.gpu_cores) for point in points()}) >= 20
    assert all(point.source.startswith("https://") for point in points())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_median_prediction_is_within_fifteen_percent_of_what_was_published(engine: str) -> None:
    assumed = assumptions(engine)
    assert median(abs(error(point, assumed)) for point in of(engine)) <= 0.15


@pytest.mark.parametrize("engine", ENGINES)
def test_also_for_chips_the_constants_have_never_seen(engine: str) -> None:
    """Leave one chip out, fit to the others, predict it."""
    known = of(engine)
    errors: list[float] = []
    for chip in {point.chip for point in known}:
        assumed = fitted([point for point in known if point.chip != chip])
        errors += [abs(error(point, assumed)) for point in known if point.chip == chip]
    assert median(errors) <= 0.15


@pytest.mark.parametrize("engine", ENGINES)
def test_the_constants_are_those_the_figures_give(engine: str) -> None:
    fresh, stated = fitted(of(engine)), assumptions(engine)
    assert stated.efficiency == pytest.approx(fresh.efficiency, abs=0.011)
    assert stated.layer_s == pytest.approx(fresh.layer_s, abs=6e-6)


def test_roofline_memory_and_context_by_hand() -> None:
    target = Target("chip", 100e9, 10 * 2**30, apple=True)
    found = predict(SHAPE, target, Assumptions("x", 0.5, 1e-4), 1000)
    step = SHAPE.cost.weight_bytes + 1001 * 131072 + 131072
    assert found.step_bytes == step
    assert found.roofline == pytest.approx(100e9 / step)
    assert found.expected == pytest.approx(1 / (32 * 1e-4 + step / 50e9))
    assert found.memory == SHAPE.resident_bytes + 1000 * 131072 + WORKING_MEMORY
    assert found.fits is True
    longest = largest_context(SHAPE, target)
    assert longest == (10 * 2**30 - SHAPE.resident_bytes - WORKING_MEMORY) // 131072
    assert predict(SHAPE, target, assumptions("mlx-lm"), longest).fits
    assert not predict(SHAPE, target, assumptions("mlx-lm"), longest + 1).fits


def test_a_fit_of_this_machine_goes_before_published_constants() -> None:
    fit = MeasuredFit(0.001, 20e9, 1e8, "2026-01-02T03:04:05Z", "headrace bench -d 0,2048", quiet=True)
    target = Target("here", 50e9, None, apple=False, fit=fit)
    found = predict(SHAPE, target, assumptions("mlx-lm"), 0)
    assert found.expected == pytest.approx(1 / fit.seconds(found.step_bytes))
    assert found.fits is None
    lines = summarise_assumptions([target], assumptions("mlx-lm"))
    assert "2026-01-02T03:04:05Z by `headrace bench -d 0,2048`" in lines[0]
    assert not any("busy" in line for line in lines)
    busy = summarise_assumptions([replace(target, fit=replace(fit, quiet=False))], assumptions("mlx-lm"))
    assert any("busy" in line for line in busy)
    assert largest_context(SHAPE, target) is None


def test_where_nothing_supports_an_expectation_there_is_none() -> None:
    assert predict(SHAPE, chip_target("RTX 4090"), assumptions("mlx-lm"), 0).expected is None


def test_what_does_not_fit_has_no_context() -> None:
    assert largest_context(SHAPE, Target("small", 1e9, 2**30, apple=True)) == 0


def test_levers_go_the_way_they_should() -> None:
    target = chip_target("M4 Max (40-core)")
    base = predict(SHAPE, target, assumptions("mlx-lm"), 8192)
    found = {
        lever.name: predict(lever.shape, target, assumptions("mlx-lm"), 8192, lever.batch) for lever in levers(SHAPE)
    }
    assert base.expected is not None
    speeds = {name: value.expected / base.expected for name, value in found.items() if value.expected}
    assert speeds["weights at 8 bits"] < 1
    assert speeds["weights at 4 bits"] == pytest.approx(1)
    assert speeds["KV cache at 8 bits"] > 1
    assert 2 < speeds["4 sequences a step"] < 4
    assert speeds["without GQA (4x the KV)"] < 1


def test_chips_as_people_write_them() -> None:
    assert chip_target("M4 Max (40-core)").bandwidth == 546e9
    assert chip_target("apple m4 max (32 cores)").bandwidth == 410e9
    assert chip_target("M2 Ultra", 64).memory == int(64 * 2**30 * 0.75)
    assert {target.name for target in known_targets()} >= {"M1", "M4 Max (40-core)", "M5 Pro"}
    for text in ("M9 Giga", "M4 Max (7-core)", ""):
        with pytest.raises(UsageError):
            chip_target(text or " ")


def test_documents() -> None:
    targets = [chip_target("M3 Pro"), chip_target("RTX 4090")]
    found = prediction("llama", SHAPE, targets, [0, 4096])
    assert [len(target["predictions"]) for target in found["targets"]] == [2, 2]
    assert found["levers"]["target"] == targets[0].name
    assert any("mlx-lm" in line for line in found["assumptions"])
    fit = catalog_fit(chip_target("M1", 8), 4096)
    by_name = {row["model"]: row for row in fit["models"]}
    assert by_name["smollm2-135m"]["fits"]
    assert not by_name["qwen2.5-32b"]["fits"]
    explained = explanation("llama", SHAPE, past=100, prefill=512)
    cost = SHAPE.cost
    assert (explained["step"]["total_bytes"], explained["step"]["total_flops"]) == (
        cost.step_bytes(100), cost.step_flops(100),
    )  # fmt: skip
