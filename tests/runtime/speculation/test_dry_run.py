"""Dry runs: draft tokens are compared with the output before passes verify them."""

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.speculation.controller import Controller
from headrace.runtime.speculation.dry_run import DryRun, Pauses
from tests.bench.speculation_replay import COSTS, read_costs, replay
from tests.support.speculating import oracle
from tests.support.tiny import load_decoder, write_model
from tests.support.watched import split


class Recorded(Controller):
    """Controller of a machine with fixed pass times, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: list[int] = []
        self.ahead: list[bool] = []

    def record(self, sequences: int, count: int, _seconds: float, *, ahead: bool, context: int = 0) -> None:
        self.drafts.append(count)
        self.ahead.append(ahead)
        super().record(sequences, count, 0.01 * (1 + 0.05 * count), ahead=ahead, context=context)


def test_accepted_draft_tokens_open_a_dry_run_early() -> None:
    dry_run = DryRun()
    dry_run.start(2, (5, 6, 7), 0.7)
    dry_run.update([1, 2])
    assert (dry_run.pays, dry_run.pending) == (False, True)
    dry_run.update([1, 2, 5])
    assert (dry_run.pays, dry_run.pending) == (False, True)
    dry_run.update([1, 2, 5, 6])
    assert (dry_run.pays, dry_run.pending) == (True, False)


def test_few_draft_tokens_are_verified_until_some_were_accepted() -> None:
    dry_run = DryRun()
    dry_run.start(0, (5, 6), 0.5)
    dry_run.update([5, 6])
    assert (dry_run.pays, dry_run.max_draft(9)) == (True, 2)
    dry_run.start(2, (7, 8), 0.3)
    dry_run.update([5, 6, 7, 8])
    assert dry_run.max_draft(9) == 9
    dry_run.start(4, (1, 2, 3), 0.3)
    dry_run.update([5, 6, 7, 8, 4])
    assert (dry_run.pays, dry_run.max_draft(9)) == (True, 2)


def test_proposals_become_rare_while_none_has_draft_tokens() -> None:
    pauses = Pauses()

    def looks(passes: int, quiet: bool) -> int:
        found = 0
        for _ in range(passes):
            if not pauses.skip():
                found += 1
                pauses.record(is_quiet=quiet)
        return found

    assert looks(10, True) == 10
    looks(400, True)
    assert looks(80, True) == 10
    looks(8, False)
    assert looks(10, False) == 10


def test_rejected_draft_tokens_end_a_dry_run() -> None:
    dry_run = DryRun()
    dry_run.start(0, (5, 6), 0.5)
    dry_run.update([5, 6])
    assert dry_run.pays
    for _ in range(2):
        dry_run.start(2, (8, 9), 0.9)
        dry_run.update([5, 6, 7])
    assert not dry_run.pays


def test_a_dry_run_ends_after_few_rejections_however_long_it_paid() -> None:
    dry_run = DryRun()
    dry_run.start(0, range(100), 1.0)
    dry_run.update(list(range(100)))
    losses = 0
    while dry_run.pays:
        dry_run.start(100, (1,), 1.0)
        dry_run.update([*range(100), 0])
        losses += 1
    assert losses == 6


def test_always_wrong_proposers_add_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer that is always sure and always wrong: all passes are queued ahead, none has a draft."""
    network = load_decoder(write_model(tmp_path / "model", "llama"))
    engine = Engine(network, context_limit=128)
    controller = engine._drafting.controller = Recorded()
    request = Request([3, 1, 4, 1, 5], 40)
    plain, _ = split(list(engine.generate(replace(request, speculate="off"))))
    for wrong in (frozenset(range(40)), frozenset[int]()):
        monkeypatch.setattr(
            "headrace.runtime.engine.drafting.NGram",
            lambda *, sampled, recent, wrong=wrong: oracle(request.prompt, plain, wrong, dry_run=DryRun()),  # noqa: ARG005  # always the same
        )
        controller.drafts.clear()
        controller.ahead.clear()
        assert split(list(engine.generate(request)))[0] == plain
        assert any(controller.drafts) == (not wrong)
        assert all(controller.ahead[1:]) == bool(wrong)


@pytest.mark.parametrize("sampled", [False, True])
def test_random_repeated_pairs_cost_at_most_one_percent(sampled: bool) -> None:
    draw = random.Random(1)
    prompt = [draw.randrange(30) for _ in range(400)]
    answer = [draw.randrange(30) for _ in range(120)]
    assert replay([(prompt, answer)], read_costs(COSTS), sampled=sampled) > 0.99


@pytest.mark.parametrize("sampled", [False, True])
def test_copied_text_is_faster(sampled: bool) -> None:
    text = list(range(100, 220))
    assert replay([([*text, 1, 2], text)], read_costs(COSTS), sampled=sampled) > 2
