"""Pass costs are reloaded by the next process on the same machine and model."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.machine.peaks import RECENT_DAYS
from headrace.runtime.metrics.cost import LayerKV, StepCost
from headrace.runtime.ops import reference
from headrace.runtime.speculation import pass_costs
from headrace.runtime.speculation.controller import Controller
from headrace.runtime.speculation.pass_costs import PassCostStore
from tests.support.tiny import load_decoder, write_model

COST = StepCost(1000, 2000, [LayerKV(2, 64)])


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path / "cache" / "speculation.json"


def test_pass_costs_are_loaded_for_the_same_model_only() -> None:
    assert PassCostStore(COST).load() == {}
    PassCostStore(COST).save({(1, 3, 0): (1.7, 9), (2, 2, 0): (1.4, 3)})
    PassCostStore(COST).save({(1, 3, 0): (1.8, 12)})
    assert PassCostStore(COST).load() == {(1, 3, 0): (1.8, 12), (2, 2, 0): (1.4, 3)}
    assert PassCostStore(StepCost(1000, 2000, [LayerKV(2, 32)])).load() == {}  # another K/V format


@pytest.mark.parametrize(
    "passes",
    [
        None,
        7,
        [[1, 3, 1.7, 9]],
        [[1, 3, -1, 1.7, 9]],
        [[1]],
        [[1, 3, 0, "x", 2]],
        [[1, 3, 0, 0.5, 2]],
        [[1, 3, 0, float("inf"), 2]],
        [[0, -3, 0, 2.0, 2]],
    ],
)
def test_invalid_stored_pass_costs_are_ignored(file: Path, passes: object) -> None:
    PassCostStore(COST).save({(1, 3, 0): (1.7, 9)})
    stored = json.loads(file.read_text())
    next(iter(stored["costs"].values()))["passes"] = passes
    file.write_text(json.dumps(stored))
    assert PassCostStore(COST).load() == {}
    for wrong in ("", "[]", '{"costs": 3}', '{"costs": {"a": 3}}'):
        file.write_text(wrong)
        assert PassCostStore(COST).load() == {}


def test_old_pass_costs_expire_and_their_file_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PassCostStore(COST).save({(1, 3, 0): (1.7, 9)})
    stored = json.loads(file.read_text())
    old = datetime.now(UTC) - timedelta(days=RECENT_DAYS + 1)
    next(iter(stored["costs"].values()))["measured_at"] = old.strftime("%Y-%m-%dT%H:%M:%SZ")
    file.write_text(json.dumps(stored))
    assert PassCostStore(COST).load() == {}
    monkeypatch.setattr(pass_costs, "MAX_MODELS", 3)
    for size in range(1, 7):
        PassCostStore(StepCost(size, size, [])).save({(1, 1, 0): (1.2, 1)})
    assert len(json.loads(file.read_text())["costs"]) == 3


def test_stored_pass_costs_are_corrected_by_measured_passes() -> None:
    stale = {(1, count, 0): (1.1 + 0.1 * count, 1000) for count in (1, 3, 7, 11, 15)}
    controller = Controller(stale)
    controller.record(1, 0, 0.01, ahead=True)
    chances = [[0.9**place for place in range(1, 16)]]
    assert controller.choose(chances)[0] > 10
    for _ in range(60):
        (count,) = controller.choose(chances)
        controller.record(1, count, 0.01 * (1 + 0.5 * count), ahead=not count)
    assert controller.choose(chances)[0] < 10
    assert controller.measured[1, 11, 0][0] > 3


def test_an_engine_saves_its_costs_and_the_next_one_loads_them(tmp_path: Path) -> None:
    network = load_decoder(write_model(tmp_path / "tiny", "llama"), reference)
    costs = PassCostStore(network.cost)
    engine = Engine(network, context_limit=256, pass_costs=costs)
    for _ in range(20):
        engine._drafting.controller.record(1, 0, 0.01, ahead=True)
        engine._drafting.controller.record(1, 3, 0.017, ahead=False)
    list(engine.generate(Request([1, 2, 3], 2)))
    kept = costs.load()
    assert kept[1, 3, 0][0] == pytest.approx(engine._drafting.controller.measured[1, 3, 0][0], abs=1e-3)
    following = Engine(network, context_limit=256, pass_costs=costs)._drafting.controller
    following.record(1, 0, 0.01, ahead=True)
    assert following._curve(1, 0).ratios[3] == kept[1, 3, 0][0]
