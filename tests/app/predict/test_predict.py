"""Predictions against published figures of Macs and arithmetic by hand."""

import re
from statistics import median

import pytest
from msgspec.structs import astuple, replace

from headrace.app.predict import targets
from headrace.app.predict.chip_names import chip_targets, known_targets, usable_bytes
from headrace.app.predict.document import catalog_fit, explanation, prediction
from headrace.app.predict.fit_store import MeasuredFit
from headrace.app.predict.prediction import (
    TargetMachine,
    fitting_kv,
    largest_context,
    levers,
    max_sequences,
    predict,
    summarise_assumptions,
)
from headrace.app.predict.published import (
    Assumptions,
    HeldOut,
    PublishedPoint,
    assumptions,
    error,
    error_line,
    held_out,
    points,
)
from headrace.app.predict.view import show_prediction
from headrace.models.cost.costs import working_memory
from headrace.models.registry.catalog import find, load_catalog
from headrace.runtime.errors import UsageError
from headrace.runtime.ops.kv_format import FLOAT16, FORMATS, K8V4, Q4, Q8
from tests.support.scripted_engine import PEAK

ENGINES = ("mlx-lm", "llama.cpp")
SHAPE = find("llama-3.1-8b").step_shape


def of(engine: str, *kinds: str) -> list[PublishedPoint]:
    """An engine's figures, of these classes or of all."""
    return [point for point in points() if point.engine == engine and (not kinds or point.kind in kinds)]


def chip_target(text: str, memory_gb: int | None = None) -> TargetMachine:
    (target,) = chip_targets(text, memory_gb)
    return target


def fitted(known: list[PublishedPoint], stated: Assumptions) -> Assumptions:
    """The constants that the file states, by least squares of the relative error: a pattern search."""

    def loss(assumed: Assumptions) -> float:
        return sum(error(point, assumed) ** 2 for point in known)

    best = Assumptions(0.9, 6.0, stated.kernels)
    free = ["efficiency", "kernel_us"]
    for name, start in {"ultra_efficiency": 0.8, "per_generation": 0.9, "mixture": 1.5}.items():
        if getattr(stated, name) != getattr(best, name):
            best = replace(best, **{name: start})
            free = [*free, name]
    least = loss(best)
    step = 0.08
    while step > 0.004:
        tried = [replace(best, **{name: getattr(best, name) * (1 + way)}) for name in free for way in (step, -step)]
        found, assumed = min(((loss(one), one) for one in tried), key=lambda pair: pair[0])
        if found < least:
            least = found
            best = assumed
        else:
            step /= 2
    return best


def test_there_are_enough_points_on_enough_chips_with_sources() -> None:
    assert len(of("mlx-lm", "dense")) >= 12
    assert len(of("mlx-lm", "small")) >= 12
    assert len(of("mlx-lm", "mixture")) >= 8
    assert len({(point.chip, point.gpu_cores) for point in points()}) >= 20
    assert all(point.source.startswith("https://") for point in points())


@pytest.mark.sampled
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["dense", "small", "mixture"])
def test_median_predictions_are_within_12_percent_of_published_figures(engine: str, kind: str) -> None:
    errors = [abs(error(point, assumptions(engine))) for point in of(engine, kind)]
    assert not errors or (median(errors) <= 0.12 and max(errors) <= 0.30)


@pytest.mark.sampled
@pytest.mark.parametrize("engine", ENGINES)
def test_predictions_hold_for_chips_left_out_of_the_fit(engine: str) -> None:
    """Leave one chip out, fit to the others, predict it."""
    assert median(abs(found) for _, found in left_out(engine, "chip")) <= 0.10


def left_out(engine: str, what: str) -> list[tuple[PublishedPoint, float]]:
    """Each figure's error where all of the same chip, or source, are left out of the fit."""
    known = of(engine)
    errors = list[tuple[PublishedPoint, float]]()
    for one in sorted({str(getattr(point, what)) for point in known}):
        assumed = fitted([point for point in known if getattr(point, what) != one], assumptions(engine))
        errors += [(point, error(point, assumed)) for point in known if getattr(point, what) == one]
    return errors


@pytest.mark.sampled
@pytest.mark.parametrize("engine", ENGINES)
def test_the_stated_errors_are_of_sources_that_were_left_out(engine: str) -> None:
    errors = left_out(engine, "source")
    stated = held_out(engine)
    for kind in [*sorted({point.kind for point, _ in errors}), "all"]:
        found = [size for point, size in errors if kind in (point.kind, "all")]
        fresh = HeldOut(len(found), median(map(abs, found)), median(found), min(found), max(found))
        assert astuple(stated[kind]) == pytest.approx(astuple(fresh), abs=0.006), (kind, fresh)
    assert stated["all"].median <= 0.08
    assert abs(stated["all"].bias) <= 0.04


@pytest.mark.sampled
@pytest.mark.parametrize("engine", ENGINES)
def test_the_stated_constants_equal_a_new_fit_to_published_figures(engine: str) -> None:
    stated = assumptions(engine)
    fresh = fitted(of(engine), stated)
    for name in ("efficiency", "kernel_us", "ultra_efficiency", "per_generation", "mixture"):
        assert getattr(stated, name) == pytest.approx(getattr(fresh, name), rel=0.03), name


def test_the_errors_are_stated_by_class() -> None:
    line = error_line("mlx-lm")
    for kind in ("dense", "below 1 GB a step", "mixtures", "all"):
        assert re.search(rf"{kind} [\d.]+ % \(\d+, [+-]\d+ % to [+-]\d+ %\)", line)


def test_layers_take_longer_with_experts_and_on_older_chips() -> None:
    target = chip_target("M4 Max (40-core)")
    assumed = assumptions("mlx-lm")
    mixture = find("qwen3-30b-a3b").step_shape

    def seconds(chip: str, assumed: Assumptions) -> float:
        nbytes = mixture.cost.step_bytes(2112)
        return assumed.seconds(
            nbytes, mixture.layers, mixture.family, chip or target.name, target.bandwidth, mixture=True
        )

    assert predict(mixture, target, 2112).expected == pytest.approx(1 / seconds("", assumed))
    plain = replace(assumed, mixture=1.0)
    layers = 48 * 19 * assumed.kernel_s * assumed.per_generation**3
    assert seconds("", assumed) - seconds("", plain) == pytest.approx(layers * (assumed.mixture - 1))
    older = 48 * 19 * assumed.kernel_s * assumed.per_generation
    assert seconds("Apple M2 Max", plain) - seconds("", plain) == pytest.approx(older - layers)
    assert seconds("Apple M4 Ultra", plain) > seconds("Apple M4", plain) == seconds("", plain)
    assert seconds("some chip", plain) == seconds("Apple M1", plain)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", 17), ("qwen2", 17), ("qwen3", 19), ("qwen3_moe", 19), ("qwen3-4b", 19), ("gemma3_text", 31),
        ("gemma-4-e4b", 31), ("qwen3_5", 40), ("qwen3_5_moe", 40), ("qwen3.6-35b-a3b", 40), ("qwen3_next", 40),
        ("", 17),
    ],
)  # fmt: skip
def test_number_of_kernels_per_family(family: str, kernels: int) -> None:
    assert assumptions("mlx-lm").kernels_of(family) == kernels


def test_roofline_memory_and_context_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetMachine("chip", 100e9, 10 * 2**30, apple=True)
    assumed = Assumptions(0.5, 100.0)
    monkeypatch.setattr("headrace.app.predict.prediction.assumptions", lambda _: assumed)
    found = predict(SHAPE, target, 1000)
    step = SHAPE.cost.weight_bytes + 1001 * 131072 + 131072
    assert found.step_bytes == step
    assert found.roofline == pytest.approx(100e9 / step)
    assert found.expected == pytest.approx(1 / (32 * 1e-4 + step / 50e9))
    assert found.memory == SHAPE.resident_bytes + 1000 * 131072 + working_memory(SHAPE, on_gpu=True)
    assert found.fits is True
    longest = largest_context(SHAPE, target)
    assert longest == (10 * 2**30 - SHAPE.resident_bytes - working_memory(SHAPE, on_gpu=True)) // 131072
    assert predict(SHAPE, target, longest).fits
    assert not predict(SHAPE, target, longest + 1).fits


def test_formats_of_kv_change_memory_and_bytes_and_nothing_else() -> None:
    target = TargetMachine("chip", 100e9, 10 * 2**30, apple=True)
    usual = SHAPE
    packed = SHAPE.with_kv(Q8)
    assert packed.with_kv(Q4) == SHAPE.with_kv(Q4)  # of whatever it was before
    a, b = (predict(shape, target, 8192) for shape in (usual, packed))
    assert b.weight_bytes == a.weight_bytes
    assert b.kv_bytes * 32 == a.kv_bytes * 17
    longest = [largest_context(SHAPE.with_kv(kind), target) or 0 for kind in FORMATS]
    assert sorted(longest) == longest
    for kind, most in zip(FORMATS, longest, strict=True):
        assert fitting_kv(SHAPE, target, most) == kind
    assert fitting_kv(SHAPE, target, longest[0] + 1) == Q8
    assert fitting_kv(SHAPE, target, longest[0], sequences=2) == K8V4
    assert fitting_kv(SHAPE, target, longest[-1] + 1) == Q4
    assert fitting_kv(SHAPE, replace(target, memory=None), 10**9) == FLOAT16
    assert not any("KV cache" in lever.name for lever in levers(packed))
    document = prediction("llama", packed, [target], [8192])
    assert document["model"]["kv_format"] == "q8"
    assert "K/V stored as q8" in document["assumptions"]


def test_a_fit_of_this_machine_goes_before_published_constants() -> None:
    fit = MeasuredFit(0.001, 20e9, 1e8, "2026-01-02T03:04:05Z", "headrace bench -d 0,2048", quiet=True)
    target = TargetMachine("here", 50e9, None, apple=False, fit=fit)
    found = predict(SHAPE, target, 0)
    assert found.expected == pytest.approx(1 / fit.seconds(found.step_bytes))
    assert found.fits is None
    lines = summarise_assumptions([target], FLOAT16)
    assert "2026-01-02T03:04:05Z by `headrace bench -d 0,2048`" in lines[0]
    assert not any("busy" in line for line in lines)
    busy = summarise_assumptions([replace(target, fit=replace(fit, quiet=False))], FLOAT16)
    assert any("busy" in line for line in busy)
    assert largest_context(SHAPE, target) is None


def test_chips_without_published_figures_have_no_expected_speed() -> None:
    assert predict(SHAPE, chip_target("RTX 4090"), 0).expected is None


def test_nothing_is_expected_above_the_roofline() -> None:
    fit = MeasuredFit(0.0, 78.9e9, 1e8, "2026-01-02T03:04:05Z", "headrace bench", quiet=True)
    target = TargetMachine("here", 13.6e9, None, apple=False, fit=fit)
    for context in (0, 100, 1000):
        found = predict(SHAPE, target, context)
        assert found.expected == pytest.approx(found.roofline)


@pytest.mark.parametrize("changes", [{"stock": True}, {"state_bytes": 1 << 20}])
def test_sequences_that_take_turns_read_the_weights_each(changes: dict[str, int]) -> None:
    """Those of mlx-lm's classes, and on a GPU of all models with recurrent state."""
    target = chip_target("M1", 64)
    one, four = (predict(replace(SHAPE, **changes), target, 0, batch) for batch in (1, 4))
    assert four.weight_bytes == 4 * one.weight_bytes
    assert four.roofline == pytest.approx(one.roofline)
    assert four.expected == pytest.approx(one.expected)


def test_users_share_the_weights_of_a_step_and_nothing_else() -> None:
    target = TargetMachine("chip", 100e9, 16 * 2**30, apple=True, flops=10e12)
    one, many, far = (predict(SHAPE, target, *asked) for asked in ((0, 1), (0, 8), (60_000, 2)))
    assert (one.weight_bytes, many.weight_bytes) == (SHAPE.cost.weight_bytes, SHAPE.cost.weight_bytes)
    assert many.kv_bytes == 8 * one.kv_bytes
    assert (one.bound, far.bound) == ("weights", "K/V")
    assert one.expected is not None
    assert many.expected is not None
    assert 4 < many.expected / one.expected < 8
    slow = predict(SHAPE, replace(target, flops=1e12), 0, 64)
    assert slow.bound == "compute"
    assert slow.roofline == pytest.approx(1e12 / SHAPE.cost.step_flops(0))
    assert slow.expected is not None
    assert slow.expected <= slow.roofline
    most = max_sequences(SHAPE, target, 1000)
    assert most
    assert predict(SHAPE, target, 1000, most).fits
    assert not predict(SHAPE, target, 1000, most + 1).fits
    assert max_sequences(SHAPE, TargetMachine("small", 1e9, 2**30, apple=True), 1000) == 0
    assert max_sequences(SHAPE, TargetMachine("unknown", 1e9, None, apple=True), 1000) is None


def test_users_of_a_mixture_read_more_experts() -> None:
    shape = find("qwen3-30b-a3b").step_shape
    weights = [shape.weight_bytes(batch) for batch in (1, 2, 8, 10**9)]
    assert weights[0] == shape.cost.weight_bytes
    assert weights[0] < weights[1] < 2 * weights[0]
    assert weights[1] < weights[2] < weights[3] <= shape.resident_bytes


def test_a_model_that_does_not_fit_has_no_context() -> None:
    assert largest_context(SHAPE, TargetMachine("small", 1e9, 2**30, apple=True)) == 0


def test_changes_move_the_speed_in_the_expected_direction() -> None:
    target = chip_target("M4 Max (40-core)")
    base = predict(SHAPE, target, 8192)
    found = {lever.name: predict(lever.shape, target, 8192, lever.batch) for lever in levers(SHAPE)}
    assert base.expected is not None
    speeds = {name: value.expected / base.expected for name, value in found.items() if value.expected}
    assert speeds["weights at 8 bits"] < 1
    assert speeds["weights at 4 bits"] == pytest.approx(1, rel=1e-3)
    assert speeds["KV cache at 8 bits"] > 1
    assert 2 < speeds["4 sequences per step"] < 4


def test_chips_are_found_as_people_write_them() -> None:
    assert chip_target("M4 Max (40-core)").bandwidth == 546e9
    assert chip_target("apple m4 max (32 cores)").bandwidth == 410e9
    assert chip_target("M2 Ultra", 64).memory == int(64 * 2**30 * 0.75)
    assert {target.name for target in known_targets()} >= {"M1", "M4 Max (40-core)", "M5 Pro"}
    assert chip_target("m4max 40-core") == chip_target("M4 Max (40-core)")
    assert [target.name for target in chip_targets("m4 max")] == ["M4 Max (32-core)", "M4 Max (40-core)"]
    assert [target.name for target in chip_targets("rtx 3080")] == ["RTX 3080 (10 GB)", "RTX 3080 (12 GB)"]
    assert [target.name for target in chip_targets("rtx 3080", 12)] == ["RTX 3080 (12 GB)"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("m4", "M4"), ("M2-ultra", "M2 Ultra"), ("4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("t4", "T4"),
        ("3060 ti", "RTX 3060 Ti"), ("Laptop 4090", "RTX 4090 Laptop GPU"), ("h100 nvl", "H100 NVL"),
        ("pro 6000", "RTX PRO 6000 Blackwell Workstation Edition"),
    ],
)  # fmt: skip
def test_an_unambiguous_part_of_a_chips_name_suffices(text: str, name: str) -> None:
    assert chip_target(text).name == name


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("ultra", "M1 Ultra, M2 Ultra or M3 Ultra", "--list-chips"),
        ("h100", "H100", "--list-chips"),
        ("m4 mex", "no 'm4 mex'", "M4 Max"),
        ("M4 Max (7-core)", "32 or 40 GPU cores, not 7", None),
        ("zebra", "no 'zebra'", "--list-chips"),
        (" ", "no ''", "--list-chips"),
    ],
)
def test_an_ambiguous_chip_name_is_refused(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        chip_targets(text)
    assert (hint or "") in (caught.value.hint or "")


def test_the_document_has_targets_levers_and_assumptions() -> None:
    targets = [chip_target("M3 Pro"), chip_target("RTX 4090")]
    found = prediction("llama", SHAPE, targets, [0, 4096])
    assert [len(target["predictions"]) for target in found["targets"]] == [2, 2]
    assert found["levers"]["target"] == targets[0].name
    assert any("mlx-lm" in line for line in found["assumptions"])
    assert [change["name"] for change in found["levers"]["changes"]] == ["KV cache at 8 bits", "4 sequences per step"]
    assert all(change["gain"] > 1 for change in found["levers"]["changes"])
    plain = prediction("llama", SHAPE.stored_at(16), targets, [0])["levers"]["changes"]
    assert [change["name"] for change in plain] == ["weights at 8 bits", "weights at 4 bits", "4 sequences per step"]
    fit = catalog_fit(chip_target("M1", 8), 4096)
    by_name = {row["model"]: row for row in fit["models"]}
    assert by_name["smollm2-135m"]["fits"]
    assert not by_name["qwen2.5-32b"]["fits"]
    explained = explanation("llama", SHAPE, past=100, prefill=512)
    cost = SHAPE.cost
    assert (explained["step"]["total_bytes"], explained["step"]["total_flops"]) == (
        cost.step_bytes(100), cost.step_flops(100),
    )  # fmt: skip


def test_a_model_that_does_not_fit_has_no_speed_but_changes_that_make_it_fit() -> None:
    target = TargetMachine("chip", 100e9, 6 * 2**30, apple=True)
    shape = SHAPE.stored_at(8)
    found = predict(shape, target, 1000)
    assert (found.fits, found.expected) == (False, None)
    document = prediction("llama", shape, [target], [1000])
    (change,) = document["levers"]["changes"]
    assert (change["name"], change["gain"], change["fits"]) == ("weights at 4 bits", None, True)
    assert change["expected"] > 0
    show_prediction(document)
    none = prediction("llama", shape, [replace(target, memory=2**30)], [1000])
    assert none["levers"]["changes"] == []
    show_prediction(none)


def test_memory_counts_without_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "known_peak", lambda _: PEAK)
    for gigabytes in (2, 64):
        found = targets.targets_for((), gigabytes)
        assert all(target.memory == usable_bytes(gigabytes, apple=target.apple) for target in found)
        assert found[0].name == "this machine"


def test_a_bandwidth_measured_under_load_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for busy in (False, True):
        monkeypatch.setattr(targets, "known_peak", lambda _, busy=busy: replace(PEAK, busy=busy))
        found = targets.targets_for((), None, others=False)
        lines = summarise_assumptions(found, FLOAT16)
        assert any("other programs" in line for line in lines) is (busy and found[0].measured)
        assert predict(SHAPE, found[0], 1000).busy is (busy and found[0].measured)


def test_the_catalogs_weight_bytes_are_read_in_every_step() -> None:
    """5 bits a weight in its layers, 9 in its table: 98.3 MB, read whole in every step."""
    default = find("smollm2-135m")
    assert default.step_shape.cost.weight_bytes == pytest.approx(default.weight_bytes, rel=2e-3)
    for entry in load_catalog().values():
        shape = entry.step_shape
        assert shape.cost.weight_bytes <= shape.resident_bytes * 1.002


@pytest.mark.parametrize(
    ("gigabytes", "megabytes"), [(16, 10_922), (32, 21_845), (36, 24_576), (48, 36_864), (64, 49_152)]
)
def test_a_mac_gives_its_gpu_two_thirds_of_a_small_memory(gigabytes: int, megabytes: int) -> None:
    """As recommendedMaxWorkingSetSize reports it."""
    assert usable_bytes(gigabytes, apple=True) >> 20 == megabytes


def test_memory_selects_the_variants_sold_with_it() -> None:
    assert [target.name for target in chip_targets("M4 Max", 128)] == ["M4 Max (40-core)"]
    assert len(chip_targets("M4 Max", None)) == 2


def test_a_chip_that_no_table_has_is_given_by_figures() -> None:
    [target] = chip_targets("1100 GB/s, 40.5 TFLOP/s", 24)
    assert (target.name, target.bandwidth, target.flops) == ("1100 GB/s, 40.5 TFLOP/s", 1.1e12, 40.5e12)
    assert target.memory == usable_bytes(24, apple=False)
    [plain] = chip_targets("90gb/s")
    assert (plain.bandwidth, plain.flops, plain.memory) == (9e10, None, None)
    with pytest.raises(UsageError, match="the chip table has no '0 GB/s'"):
        chip_targets("0 GB/s")
