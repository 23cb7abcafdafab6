"""Predictions for several machines: arithmetic by hand, and published figures."""

import json
import runpy
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from headrace.app.cli.predict import predict
from headrace.app.predict.chip_names import machine_targets
from headrace.app.predict.hosts import (
    HostsPrediction,
    link_seconds,
    possible_splits,
    predict_hosts,
    split_layers,
    tensor_shares,
)
from headrace.app.predict.hosts_document import hosts_prediction, links_between
from headrace.app.predict.links import links
from headrace.app.predict.prediction import TargetMachine
from headrace.app.predict.prediction import predict as predict_one
from headrace.models.cost.costs import working_memory
from headrace.models.registry.catalog import find
from headrace.runtime.errors import UsageError
from tests.test_house import ROOT

SHAPE = find("qwen2.5-32b").step_shape
TB5 = links()["tb5"]
IDEAL = replace(TB5, latency=0.0, bandwidth=1e18)
TWO = machine_targets("2x M4 Max 128 GB")


def computed(targets: list[TargetMachine], way: Any, link: Any = IDEAL) -> HostsPrediction:
    return predict_hosts(SHAPE, targets, link, 1000, way=way)


def test_times_of_collectives_equal_those_by_hand() -> None:
    """A ring of three sends four parts of a third each, or two wholes; a mesh exchanges once."""
    link = replace(TB5, latency=1e-3, bandwidth=1e6, mesh=0, gathers=False)
    assert link.all_sum_s(3000, 3) == pytest.approx(4 * (1e-3 + 1e-3))
    assert link.all_gather_s(3000, 3) == pytest.approx(2 * (1e-3 + 1e-3))
    gathering = replace(link, gathers=True)
    assert gathering.all_sum_s(300, 3) == pytest.approx(2 * (1e-3 + 3e-4))
    assert gathering.all_sum_s(9000, 3) == pytest.approx(link.all_sum_s(9000, 3))
    assert gathering.all_sum_s(9000, 2) == pytest.approx(1e-3 + 9e-3)
    mesh = replace(link, mesh=3)
    assert mesh.all_sum_s(3000, 3) == pytest.approx(1e-3 + 3e-3)
    assert mesh.all_sum_s(3000, 4) == link.all_sum_s(3000, 4)


def test_one_machine_is_the_prediction_of_one_machine() -> None:
    alone = predict_one(SHAPE, TWO[0], 1000)
    assert computed(TWO[:1], "alone").speed == pytest.approx(alone.expected)
    assert computed(TWO[:1], "alone").memory == pytest.approx((alone.memory,), rel=1e-6)


def test_an_ideal_link_adds_no_time() -> None:
    """Tensor parallel halves the bytes; a pipeline halves memory, and computes two answers in the time of one."""
    alone, tensor, pipeline = (computed(TWO[:n], way) for n, way in ((1, "alone"), (2, "tensor"), (2, "pipeline")))
    assert 1.8 < tensor.speed / alone.speed < 2
    assert tensor.link_share == pytest.approx(0, abs=1e-6)
    assert pipeline.speed == pytest.approx(alone.speed, rel=0.01)
    assert pipeline.together == pytest.approx(2 * alone.speed, rel=0.1)
    assert sum(pipeline.memory) < 1.2 * alone.memory[0]
    assert tensor.memory[0] < 0.6 * alone.memory[0]
    assert tensor.prefill == pytest.approx(2 * (alone.prefill or 0))


def test_a_slow_link_makes_two_machines_slower_than_one() -> None:
    alone = computed(TWO[:1], "alone")
    wifi = links()["wifi"]
    assert computed(TWO, "tensor", links()["tb5-rdma"]).speed > alone.speed
    assert computed(TWO, "tensor", TB5).speed < alone.speed
    assert computed(TWO, "tensor", wifi).speed < computed(TWO, "pipeline", wifi).speed < alone.speed
    assert computed(TWO, "tensor", wifi).link_share > 0.95


def test_waits_of_a_step_by_hand() -> None:
    """Two all_sums a layer and one for the embedding, and a gathering of the logits."""
    link = replace(TB5, latency=1e-3, bandwidth=1e18)
    found = computed(TWO, "tensor", link)
    assert found.link_share / found.speed == pytest.approx((2 * SHAPE.layers + 2) * 1e-3, rel=1e-3)
    pipeline = computed(TWO, "pipeline", link)
    assert pipeline.link_share / pipeline.speed == pytest.approx(2e-3, rel=1e-3)


def test_shares_follow_bandwidth() -> None:
    unequal = machine_targets("M4 Max 128 GB,M4 Pro 64 GB")  # 546 and 273 GB/s
    assert split_layers(SHAPE, unequal, 1000) == (42, 22)  # the output projection is as long as 1.6 layers
    assert split_layers(SHAPE, TWO, 1000) == (31, 33)
    assert split_layers(replace(SHAPE, stock=True), TWO, 1000) == (32, 32)
    assert tensor_shares(SHAPE, unequal) == [5 / 8, 3 / 8]
    assert tensor_shares(replace(SHAPE, kv_heads=1), unequal) == [27 / 40, 13 / 40]


def test_layers_follow_memory_where_it_is_short() -> None:
    small = [replace(TWO[0], memory=size << 30) for size in (8, 40)]
    layers = split_layers(SHAPE, small, 1000)
    assert sum(layers) == SHAPE.layers
    assert layers[0] < layers[1]
    found = predict_hosts(SHAPE, small, IDEAL, 1000, way="pipeline")
    assert found.fits is True
    tiny = [replace(TWO[0], memory=5 << 30) for _ in range(2)]
    assert predict_hosts(SHAPE, tiny, IDEAL, 1000, way="pipeline").fits is False
    assert sum(split_layers(SHAPE, tiny, 1000)) == SHAPE.layers


def test_working_memory_of_a_pipeline_does_not_grow_with_fewer_layers() -> None:
    shape = find("qwen3-30b-a3b").step_shape
    found = predict_hosts(shape, TWO, IDEAL, 0, way="pipeline")
    weights = sum(m.count * m.nbytes for m in shape.matrices if not m.output) + shape.vector_bytes
    own_weights = found.layers[1] / shape.layers * weights
    assert found.memory[1] - own_weights == pytest.approx(working_memory(shape, on_gpu=True), rel=1e-6)


def test_lists_of_machines_are_read() -> None:
    found = machine_targets("M4 Max 64 GB, 2x M3 Ultra 256GB", 96)
    assert [(one.name, (one.memory or 0) >> 30) for one in found] == [
        ("M4 Max (40-core)", 48),
        ("M3 Ultra", 192),
        ("M3 Ultra", 192),
    ]
    assert (machine_targets("2x M4 Max", 36)[0].memory or 0) == 24 << 30
    for wrong in ("M4 Max", "", "17x M4 Max", "M4 Max,,M4 Pro", "M4 Max,nonsense", "0x M4 Max,M4 Pro"):
        with pytest.raises(UsageError):
            machine_targets(wrong)


def test_links_are_those_that_both_machines_have() -> None:
    old = machine_targets("2x M2 Ultra")
    assert [link.name for link in links_between(old, None)] == ["10gbe", "wifi"]
    assert [link.name for link in links_between(TWO, None)] == list(links())
    for targets, name in ((old, "tb5"), (TWO, "tb6")):
        with pytest.raises(UsageError):
            links_between(targets, name)


def test_predict_prints_the_best_split_for_each_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    given = ["-m", "qwen3-30b-a3b", "--hosts", "M4 Max,M4 Pro"]
    document = json.loads(CliRunner().invoke(predict, [*given, "--json"], catch_exceptions=False).stdout)
    by_name = {link["name"]: link for link in document["links"]}
    assert list(by_name) == list(links())
    assert by_name["tb5"]["slower_than_alone"] is True
    assert by_name["tb5"]["best"] == "pipeline"
    assert all(len(link["predictions"]) == 2 for link in document["links"])
    text = CliRunner().invoke(predict, [*given, "--link", "wifi"], catch_exceptions=False).stdout
    assert "pipeline 30+18" in text
    for wrong in (["--chip", "m4"], ["--users", "2"], ["--context", "1,2"], ["--link", "x"]):
        with pytest.raises(UsageError):
            CliRunner().invoke(predict, [*given, *wrong], catch_exceptions=False, standalone_mode=False)
    with pytest.raises(UsageError):
        CliRunner().invoke(predict, ["--link", "tb5"], catch_exceptions=False, standalone_mode=False)


def test_predictions_are_near_published_figures() -> None:
    """Half are within 22 %; the page has what its script renders."""
    render = runpy.run_path(str(ROOT / "docs/hosts/render.py"))
    rows = render["_file"]()["published"]
    errors = [abs(render["computed"](row)[0] / row["speed"] - 1) for row in rows]
    assert median(errors) < 0.22
    page = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
    assert render["rendered"](page) == page


@pytest.mark.parametrize(
    ("changes", "machines", "ways"),
    [
        ({}, TWO, ["tensor", "pipeline"]),
        ({"splits": ((), ("pipeline",))}, TWO, ["pipeline"]),
        ({"splits": (("tensor",), ("pipeline",))}, [TWO[0], replace(TWO[1], apple=False)], []),
    ],
)
def test_only_ways_that_all_machines_run_are_predicted(
    changes: Any, machines: list[TargetMachine], ways: list[str]
) -> None:
    shape = replace(SHAPE, **changes)
    assert possible_splits(shape, machines) == ways
    if ways:
        document = hosts_prediction("it", shape, machines, [TB5], 1000, 512)
        assert [one["way"] for one in document["links"][0]["predictions"]] == ways
    else:
        with pytest.raises(UsageError, match="one machine"):
            hosts_prediction("it", shape, machines, [TB5], 1000, 512)


def test_norms_over_all_heads_add_sums() -> None:
    more = replace(SHAPE, joint_norms=SHAPE.layers)
    slow = replace(TB5, latency=1e-3, bandwidth=1e18)
    assert link_seconds(more, slow, 2, "tensor") / link_seconds(SHAPE, slow, 2, "tensor") == pytest.approx(
        1.5, rel=0.02
    )


def test_no_split_is_offered_for_a_class_that_mlx_lm_cannot_divide() -> None:
    gpus = TWO
    cpus = [replace(target, apple=False) for target in TWO]
    assert possible_splits(find("lfm2.5-1.2b").step_shape, gpus) == []
    assert (
        possible_splits(find("lfm2.5-1.2b").step_shape, cpus)
        == possible_splits(find("qwen3.5-9b").step_shape, gpus)
        != []
    )
