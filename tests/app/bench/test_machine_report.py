"""A machine's report in the form of assets/measured.toml: written, read back, and shown by predictions."""

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.bench.measure.ratios import ratios
from headrace.app.bench.measure.records import RunDocument
from headrace.app.bench.show.machine_report import machine_report
from headrace.app.predict import measured
from headrace.app.predict.chip_names import chip_targets
from headrace.app.predict.document import prediction
from headrace.app.predict.prediction import TargetMachine
from headrace.app.predict.view import show_prediction
from headrace.app.verify.checks import CheckResult
from headrace.app.verify.verify import VerifyDocument
from headrace.models.registry.catalog import find
from headrace.runtime.machine.chips import table
from headrace.runtime.ops.kv_format import Q8
from tests.app.bench.test_views import document
from tests.test_house import ROOT

CHECKS = [
    CheckResult(
        name="", result=result, sequences=1, tokens=1, missing_tokens=0, kv_entries=0, changed_kv_entries=0,
        largest_gap=0.0, flips=[], kv_changes=[], note="",
    )
    for result in ("equal", "equal", "equal", "near ties")
]  # fmt: skip
VERIFIED = VerifyDocument(
    model="qwen3-8b", passed=True, interrupted=False, exact_expected=True, tolerance=0.0, expectation="", tokens=1,
    sequences=1, seed=0, kernels={}, threads=None, checks=CHECKS, versions={},
)  # fmt: skip


def _document(**device: Any) -> RunDocument:
    """Return the document of a simulated run of qwen3-8b and mlx-lm on an M4 Max."""
    made = document()
    results = [
        replace(entry, model="qwen3-8b", engine="mlx-lm" if entry.engine == "llama.cpp" else entry.engine)
        for entry in made.results
    ]
    mac = {"name": "Apple M4 Max", "gpu_cores": 40, "memory_bytes": 128 << 30, "backend": "metal"}
    return replace(
        made,
        results=results,
        ratios=ratios(results, "mlx-lm"),
        device=replace(made.device, **{**mac, **device}),
        model=replace(made.model, name="qwen3-8b"),
        versions={"python": "3.13", "headrace": "0.1.0"},
    )


def _report(*documents: RunDocument, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    [machine] = tomllib.loads(machine_report(documents, VERIFIED, notes))["machine"]
    return machine


def test_a_report_has_the_machine_its_speeds_and_the_verification() -> None:
    machine = _report(_document(), notes=("gpt-oss-20b was not measured: too large",))
    assert (machine["chip"], machine["gpu_cores"], machine["memory_gb"]) == ("Apple M4 Max", 40, 128)
    assert (machine["memory_gb_s"], machine["idle_watts"]) == (50.0, 11.0)
    assert machine["verify"] == {"model": "qwen3-8b", "passed": True, "equal": 3, "near_ties": 1}
    assert machine["notes"] == ["gpt-oss-20b was not measured: too large", "a note"]
    rows = {(row["test"], row["depth"]): row for row in machine["speeds"]}
    assert len(rows) == 5
    row = rows["tg64", 2048]
    median, low, high = row["tokens_per_second"]
    assert low <= median <= high
    assert row["mlx_lm"] == pytest.approx(median / 1.3, rel=0.001)
    assert row["ratio"][0] == pytest.approx(1.3, rel=0.001)
    assert row["joules_per_token"] == pytest.approx(0.04762, rel=0.001)
    assert row["headers"] == "0" * 12
    assert "joules_per_token" not in rows["pp512", 0]  # unknown is absent


def test_figures_of_a_busy_machine_are_left_out() -> None:
    made = _document(gpu_cores=None)
    made.results[1] = replace(made.results[1], busy=True)
    machine = _report(made)
    assert "gpu_cores" not in machine
    assert {(row["test"], row["depth"]) for row in machine["speeds"]}.isdisjoint({("tg64", 0)})
    assert machine["notes"][-1] == "left out, the machine was busy: qwen3-8b tg64 @ d0"


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[measured.MeasuredSpeed]:
    """Two reports appended to one file, as pull requests do it; the second is newer."""
    file = tmp_path / "measured.toml"
    old = _document()
    faster = [
        replace(entry, tokens_per_second=replace(speed, median=2 * speed.median))
        for entry in old.results
        if (speed := entry.tokens_per_second)
    ]
    new = replace(old, created="2026-05-06T00:00:00Z", results=faster)
    text = measured.FILE.read_text(encoding="utf-8")
    file.write_text("\n".join([text, *(machine_report([one], VERIFIED, ()) for one in (new, old))]))
    found = measured.load(file)
    monkeypatch.setattr(measured, "measured", lambda: found)
    return list(found)


def test_reports_are_appended_and_read(known: list[measured.MeasuredSpeed]) -> None:
    here = [one for one in known if one.chip == "Apple M4 Max"]
    assert [(one.depth, one.date) for one in here] == [
        (depth, date) for date in ("2026-01-02", "2026-05-06") for depth in (0, 2048)
    ]  # decodes only
    assert here[0].ratio == pytest.approx(1.3, rel=0.001)


def test_predictions_show_measured_speeds(
    known: list[measured.MeasuredSpeed], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = find("qwen3-8b").step_shape
    targets = [*chip_targets("M4 Max"), *chip_targets("M4 Pro")]
    this = TargetMachine("this machine", targets[1].bandwidth, None, True, chip="Apple M4 Max")
    found = prediction("qwen3-8b", shape, [*targets, this], [2048, 4096])
    speeds = [[one["measured"] for one in target["predictions"]] for target in found["targets"]]
    newest = known[-1].tokens_per_second
    assert [first and first["tokens_per_second"] for first, _ in speeds] == [None, newest, None, newest]
    assert all(second is None for _, second in speeds)  # no other number of tokens
    show_prediction(found)
    shown = capsys.readouterr().out
    assert "measured @2048" in shown
    assert "measured @4096" not in shown
    assert "measured on Apple M4 Max, 2026-05-06, headrace 0.1.0" in shown
    packed = prediction("qwen3-8b", shape.with_kv(Q8), targets, [2048])
    assert packed["targets"][1]["predictions"][0]["measured"] is None


def test_the_page_shows_measured_speeds_in_place_of_computed_ones(
    known: list[measured.MeasuredSpeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    render = runpy.run_path(str(ROOT / "docs/benchmarks/render.py"))
    computed = {**render["tables"]()["metal-simulated"], "depth": 2048}
    rows = {row["model"]: row for row in render["with_measured"](computed)["rows"]}
    before = {row["model"]: row for row in computed["rows"]}
    speed = known[-1].tokens_per_second
    assert rows["qwen3-8b"]["M4 Max"] == f"**{speed:.3g} : {speed / known[-1].ratio:.3g}**"  # type: ignore[operator]
    assert {name for name in rows if rows[name] != before[name]} == {"qwen3-8b"}
    slower = tuple(replace(one, gpu_cores=32) for one in known)
    monkeypatch.setattr(measured, "measured", lambda: slower)  # another variant of the chip
    assert render["with_measured"](computed)["rows"] == computed["rows"]


def test_the_shipped_file_is_of_chips_and_models_that_are_known() -> None:
    """The README says so until a Mac was measured."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    speeds = measured.load()
    assert {one.chip for one in speeds} <= {chip.name for chip in table()}
    assert all(find(one.model).step_shape for one in speeds)
    assert ("Nothing has been measured on a Mac" in text) == (not any("Apple" in one.chip for one in speeds))
