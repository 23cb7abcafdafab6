"""The figures of answers that grow side by side, and the map of the pool: plain numbers and lines."""

import pytest
from msgspec.structs import replace

from headrace.app.engine.events import BatchStatus, Delta, Died, Done, Failed, Prefill
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.tables import SequencesSection
from headrace.app.tui.metrics.answers import TurnAnswers
from headrace.app.tui.metrics.facts import TurnFigures
from headrace.app.tui.metrics.figures import latency_window
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.engine.request import Finished
from headrace.runtime.machine.machine_load import MachineLoad
from headrace.runtime.metrics.telemetry import PoolStats
from tests.support.deltas import delta
from tests.support.scripted_engine import COST, record, summary


def served(at: float, tokens: int, batches: tuple[int, ...] = (), **states: str) -> BatchStatus:
    by_id = {int(name[1:]): state for name, state in states.items()}
    return BatchStatus(by_id, tokens, at, batches, 1 << 20, 1 << 30, 4 << 20, PoolStats(6, 2, 3, 1))  # type: ignore[arg-type]


def stepped(number: int, steps: range, batch: int) -> Delta:
    return delta(number, "x", tuple(record(step, 20 + step, batch) for step in steps))


def done(number: int, said: int, reason: str = "stop") -> Done:
    return Done(number, Finished(reason, summary(20, 0, said)))  # type: ignore[arg-type]


def test_a_row_has_state_tokens_speed_reuse_and_the_last_words() -> None:
    metrics = LiveMetrics()
    metrics.begin_batch((7, 9))
    words = delta(9, "and so the \x1b[31mmill\nwheel turns", ())
    metrics.take([Prefill(7, 3, 19, 1), Prefill(9, 19, 19, 12), stepped(9, range(20), 2), words, served(1.0, 20)])
    section = SequencesSection(metrics)
    lines = [line.plain for line in section.lines(metrics, 70, 7)]
    assert lines[0].split() == ["state", "tokens", "tok/s", "cached", "last", "words"]
    assert lines[1].split()[:7] == ["1", "◌", "prefill", "16", "%", "–", "1"]
    assert lines[2].split()[:6] == ["2", "●", "decode", "20", "138", "12"]
    assert lines[2].endswith("mill wheel turns")
    assert "\x1b" not in lines[2]
    assert lines[3].startswith("weights 46.7 MiB a token  93.5 MiB a step")
    assert lines[4].startswith("blocks █ 4 own  ▒ 3 cached  ▓ 2 shared  · 1 free")
    assert lines[5] == "████▓▓▒▒▒·"
    for width, height in ((36, 6), (20, 3)):
        short = section.lines(metrics, width, height)
        assert len(short) <= height
        assert all(line.cell_length <= width for line in short)


def test_prefix_hits_are_of_all_answers_and_of_each() -> None:
    metrics = LiveMetrics()
    metrics.begin_batch((7,))
    metrics.take([Prefill(7, 3, 19, 1), served(1.0, 20)])
    metrics.set_turns(
        [TurnFigures.of(number, summary(20, reused, 5), "stop") for number, reused in ((1, 0), (2, 20), (3, 10))]
    )
    lines = [line.plain for line in SequencesSection(metrics).lines(metrics, 70, 12)]
    assert lines[-1] == "prefix hits 50 % of the prompt tokens of 3 answers  ▁█▅"
    narrow = [line.plain for line in SequencesSection(metrics).lines(metrics, 36, 9)]
    assert "prefix hits 50 %  ▁█▅" in narrow
    assert "blocks █ 4 own  + 6 others" in narrow


def test_a_stall_of_a_batch_is_attributed_to_other_programs() -> None:
    metrics = LiveMetrics()
    metrics.begin_batch((7, 9))
    slow = replace(record(20, 40, 2), latency_s=0.2)
    metrics.take([stepped(7, range(20), 2), delta(7, "x", (slow,)), stepped(9, range(5), 2)])
    metrics.set_load(MachineLoad(2, 2.0, 1.0, memory_used=0, memory_total=1, swap_used=0))
    for shown in (metrics, metrics.frozen()):
        window = latency_window(shown.latency_steps, shown.latencies, shown.busy_steps, 100)
        assert window is not None
        assert window.stalls == {19: "other programs"}


def test_each_answer_of_a_turn_has_a_row() -> None:
    several = TurnAnswers((7, 9))
    several.take(Prefill(7, 3, 19, 0))
    several.take(stepped(9, range(4), 2))
    first, second = several.rows
    assert (first.number, first.phase, first.prefill_done, first.prefill_total) == (1, "prefill", 3, 19)
    assert (second.number, second.phase, second.tokens) == (2, "decode", 4)
    assert second.totals.tokens_per_second == pytest.approx(3 / sum(record(n, 20).latency_s for n in (1, 2, 3)))
    assert several.growing == 2
    several.take(served(1.0, 4, (), n7="preempted", n9="decode"))
    assert first.phase == "preempted"
    several.take(done(9, 3))
    several.take(served(1.5, 4, (), n9="finished"))
    assert (second.phase, second.tokens) == ("done", 3)
    several.take(Failed(7, "no memory", None))
    assert (first.phase, several.over) == ("failed", True)


def test_weights_are_read_once_for_all_of_a_pass() -> None:
    several = TurnAnswers((1, 2, 3, 4))
    for number in several.ids:
        several.take(stepped(number, range(5), 4))
    assert several.weight_bytes_per_token == COST.weight_bytes / 4
    several.take(stepped(1, range(5, 25), 1))  # the others have ended
    assert several.weight_bytes_per_token == COST.weight_bytes * (20 / 4 + 20) / 40


def test_speed_is_of_all_together_now_and_over_the_turn() -> None:
    several = TurnAnswers((1, 2))
    several.take(served(10.0, 0))
    assert several.rate_average is None
    for look in range(1, 9):
        several.take(served(10 + look * 0.5, 100 + (look - 1) * (50 if look < 5 else 10), (2, 2), n1="decode"))
    assert list(several.batches) == [2] * 16
    assert several.rate_now == pytest.approx(20)
    assert several.rate_average == pytest.approx((170 - 100) / 3.5)


def test_only_a_turn_of_several_answers_has_rows() -> None:
    metrics = LiveMetrics()
    metrics.take([Prefill(1, 0, 19, 0), stepped(1, range(5), 1), done(1, 5)])
    assert not metrics.answers.is_several
    metrics.begin_batch((2, 3))
    metrics.take([stepped(2, range(3), 2), stepped(3, range(3), 2)])
    assert (metrics.phase, metrics.running, len(metrics.turns)) == ("decode", None, 1)
    frozen = metrics.frozen()
    metrics.take([done(2, 3), done(3, 3, "cancelled"), served(2.0, 6)])
    assert metrics.phase == "idle"
    assert [row.phase for row in metrics.answers.rows] == ["done", "stopped"]
    assert [row.phase for row in frozen.answers.rows] == ["decode", "decode"]
    metrics.begin_batch((4, 5))
    metrics.take([Died("killed")])
    assert metrics.phase == "dead"
    assert [row.phase for row in metrics.answers.rows] == ["failed", "failed"]
    metrics.take([Prefill(6, 0, 19, 0)])
    assert not metrics.answers.is_several


@pytest.mark.parametrize(("ids", "text"), [((7,), "1 answer "), ((7, 9), "2 answers ")])
def test_finished_answers_are_counted_in_words(ids: tuple[int, ...], text: str) -> None:
    metrics = LiveMetrics()
    metrics.begin_batch(ids)
    for number in ids:
        metrics.take([stepped(number, range(3), len(ids)), done(number, 3)])
    lines = [line.plain for line in MeterLines(metrics).lines(metrics, 116, MeterLines.HEIGHT)]
    assert f" {text}" in f" {lines[-1].strip()} "
