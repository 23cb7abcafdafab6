"""The summary of `run --json --steps` follows from its steps, to the last bit, however the answer ends."""

import json
from collections.abc import Sequence
from math import fsum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.app.answer.answer import Answer, EncodedPrompt
from headrace.app.answer.sentence import CPU_BUSY, sentence
from headrace.app.cli.run.answer_report import RunReport, document, run_trace, summary_line, table
from headrace.runtime.engine.request import Finished, Request, Step
from headrace.runtime.engine.timeline import Timeline
from headrace.runtime.machine import peaks
from headrace.runtime.machine.energy import TokenEnergy
from headrace.runtime.machine.hardware import machine
from headrace.runtime.machine.machine_load import CPUUse
from headrace.runtime.metrics.cost import LayerKV, StepCost
from headrace.runtime.metrics.telemetry import Percentiles
from tests.support.deltas import delta_of

COST = StepCost(98_000_000, 2 * 98_000_000, [LayerKV(30, 768)], 4)
NETWORK = SimpleNamespace(cost=COST)
MODEL: Any = SimpleNamespace(
    name="m", kind="headrace", network=NETWORK, context_limit=1000, kv=None, activations=16, ranks=()
)
PROMPT = 7
TOKENIZER: Any = SimpleNamespace(answer_stream=lambda *_, **__: None, token_text=str)


class Cache:
    """As much of a cache as a timeline asks."""

    allocated_bytes = 1 << 20

    def __init__(self) -> None:
        self.committed = PROMPT - 1

    @property
    def committed_bytes(self) -> int:
        return COST.kv_bytes(self.committed)


def report(waits: Sequence[tuple[float, int]], reason: Any, ended_by_token: bool) -> dict[str, Any]:
    """Return the document of an answer with steps after these waits."""
    parsed = json.loads(json.dumps(document(finished(waits, reason, ended_by_token), with_steps=True)))
    assert isinstance(parsed, dict)
    return parsed


def finished(waits: Sequence[tuple[float, int]], reason: Any, ended_by_token: bool) -> RunReport:
    """Return the report of an answer with steps after these waits."""
    now = [1234.5678]
    timeline = Timeline(cost=COST, prompt_tokens=PROMPT, clock=lambda: now[0])
    now[0] += 0.125
    timeline.prefilled()
    cache: Any = Cache()
    records = []
    for wait, tokens in waits:
        now[0] += wait
        cache.committed += tokens
        records.append(timeline.step_done(cache, tokens=tokens, proposed=tokens // 2 * 3, source="ngram"))
    steps = [Step((1,) * record.tokens, record) for record in records]
    if ended_by_token:
        steps[-1] = replace(steps[-1], tokens=steps[-1].tokens[:-1])
    summary = timeline.summary(cache, sum(len(step.tokens) for step in steps))
    alone = ended_by_token and not steps[-1].tokens
    stop = (9 if ended_by_token else None, steps.pop().record if alone else None)
    peak = peaks.summarise([5e10], pass_bytes=1, method="made up", source="bench")
    answer: Any = Answer(EncodedPrompt([1] * PROMPT), Request([1] * PROMPT), TOKENIZER)
    answer.steps, answer.finished = steps, Finished(reason, summary, *stop)
    return RunReport(
        model=MODEL, answer=answer, load_s=0.0, session=None, sampling_source="default",
        machine=machine(), peak=peak, memory_now=peak, compute_flops=None, kernels={}, versions={},
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.floats(1e-5, 2.0), st.integers(1, 4)), max_size=80),
    st.sampled_from([("stop", True), ("stop", False), ("length", False), ("cancelled", False)]),
)
def test_every_figure_of_the_steps_can_be_computed_from_them(
    waits: list[tuple[float, int]], end: tuple[str, bool]
) -> None:
    reason, ended_by_token = end
    said = report(waits, reason, ended_by_token and bool(waits))
    steps = said["steps"]
    assert said["decode_steps"] == len(steps) == len(waits)
    assert said["completion_tokens"] == len(said["tokens"])
    said_by = [step["accepted"] + 1 for step in steps]
    assert said["completion_tokens"] == sum(said_by) - (ended_by_token and bool(waits))
    for total, key in (("proposed_tokens", "proposed"), ("accepted_tokens", "accepted")):
        assert said[total] == sum(step[key] for step in steps)
    latencies = [step["latency_s"] for step in steps]
    assert said["first_step_s"] == (latencies[0] if latencies else None)
    assert said["kv_cache_bytes"] == (steps[-1]["kv_used_bytes"] if steps else COST.kv_bytes(PROMPT - 1))
    if len(steps) < 2:
        assert said["tpot_s"] is said["decode_tokens_per_second"] is said["achieved_bandwidth_gb_s"] is None
        return
    between = latencies[1:]
    assert said["tpot_s"] == fsum(between) / sum(said_by[1:])
    assert said["decode_tokens_per_second"] == 1 / said["tpot_s"]
    each = [latency / tokens for latency, tokens in zip(between, said_by[1:], strict=True) for _ in range(tokens)]
    for key, values in (("step_ms", between), ("itl_ms", each)):
        spread = Percentiles.of(values)
        assert spread is not None
        assert said[key] == {name: getattr(spread, name) * 1e3 for name in ("p50", "p95", "p99", "max")}
    moved = sum(step["weight_bytes"] + step["kv_bytes_read"] + step["kv_bytes_written"] for step in steps[1:])
    assert said["achieved_bandwidth_gb_s"] == moved / fsum(between) / 1e9
    assert said["mbu"] == said["achieved_bandwidth_gb_s"] / said["memory_gb_s"]
    assert not any("mbu" in step for step in steps)


def test_mbu_uses_the_bandwidth_during_the_answer_or_the_peak() -> None:
    found = finished([(0.01, 1)] * 9, "length", False)
    achieved = found.summary.achieved_gb_s
    assert achieved is not None
    peak = replace(found.peak, bytes_per_second=achieved * 4e9)
    slow, fast = (replace(found.peak, bytes_per_second=achieved * factor * 1e9) for factor in (0.5, 2.0))
    assert replace(found, peak=peak, memory_now=fast).mbu.share == pytest.approx(0.5)
    assert replace(found, peak=peak, memory_now=slow).mbu.share == pytest.approx(0.25)


@pytest.mark.parametrize(("compute_flops", "roof"), [(None, "memory"), (1e12, "memory"), (2e9, "arithmetic")])
def test_the_sentence_and_the_report_have_the_same_limit(compute_flops: float | None, roof: str) -> None:
    found = replace(finished([(0.5, 1)] * 9, "length", False), compute_flops=compute_flops)
    slow = replace(found, memory_now=replace(found.peak, bytes_per_second=found.peak.bytes_per_second / 2))
    for report in (found, slow):
        said = document(report, with_steps=False)
        assert said["limited_by"] == roof
        assert said["roofline_tokens_per_second"] == pytest.approx(report.figures.roofline_rate, rel=1e-3)
        assert ("GFLOP" in said["explanation"]) == (roof == "arithmetic")


def test_the_sentence_has_the_figures_of_the_steps() -> None:
    found = finished([(0.01, 1), (0.004, 3), (0.006, 1), (0.005, 2)], "length", False)
    said = document(found, with_steps=True)
    figures = found.figures
    assert figures.rate == pytest.approx(said["decode_tokens_per_second"])
    assert figures.share == pytest.approx(said["mbu"])
    moved = [step["weight_bytes"] + step["kv_bytes_read"] + step["kv_bytes_written"] for step in said["steps"][1:]]
    assert figures.step_bytes == pytest.approx(sum(moved) / len(moved))
    assert said["explanation"] == sentence(figures)
    assert "2.0 tokens" in said["explanation"]
    assert "No speed yet" in document(finished([(0.01, 1)], "length", False), with_steps=False)["explanation"]


def test_the_trace_has_the_steps_and_their_latencies() -> None:
    found = finished([(0.5, 1), (0.004, 3), (0.006, 1)], "length", False)
    events = [event for event in run_trace(found)["traceEvents"] if event.get("cat") == "decode"]
    said = document(found, with_steps=True)["steps"]
    assert [event["dur"] for event in events] == pytest.approx([step["latency_s"] * 1e6 for step in said], rel=1e-5)
    assert events[0]["ts"] == pytest.approx((found.summary.queue_s + found.summary.prefill_s) * 1e6)


def test_a_busy_machine_has_no_mbu() -> None:
    found = finished([(0.01, 1)] * 9, "length", False)
    found.answer.cpu_use = CPUUse(2, busy_cpus=2.0, own_cpus=1.0)
    said = document(found, with_steps=False)
    assert (said["mbu"], said["busy"], said["other_cpus"]) == (None, True, 1.0)
    assert "MBU busy" in summary_line(found)
    assert said["explanation"].endswith("in part because other programs used 1.0 of 2 cores.")
    assert dict(table(found))["MBU"].startswith("busy: other programs used 1.0 of 2 cores")
    found.answer.cpu_use = None  # too short to tell; the reading of memory was not
    busy = replace(found, memory_now=replace(found.memory_now, busy=True))
    assert (document(busy, with_steps=False)["mbu"], dict(table(busy))["MBU"]) == (None, f"busy: {CPU_BUSY}")
    assert document(busy, with_steps=False)["explanation"].endswith(f"in part because {CPU_BUSY}.")
    assert not found.busy
    found.answer.cpu_use = CPUUse(2, busy_cpus=2.0, own_cpus=1.9)
    said = document(found, with_steps=False)
    assert (said["mbu"] is None, said["busy"]) == (False, False)


def test_energy_of_a_token_is_shown_where_it_is_known() -> None:
    found = finished([(0.01, 1)] * 9, "length", False)
    assert document(found, with_steps=False)["energy_per_token"] is None
    assert "energy" not in dict(table(found))
    whole = replace(found, energy=TokenEnergy(None, 0.3, 12.0, None, "CPU"))
    assert dict(table(whole))["energy"] == "300 mJ per token with idle power (12.0 W of CPU)"
    net = replace(found, energy=TokenEnergy(0.25, 0.3, 12.0, 2.0, "CPU"))
    assert dict(table(net))["energy"] == "250 mJ per token net of 2.0 W idle (12.0 W of CPU)"
    said = document(net, with_steps=False)["energy_per_token"]
    assert said == {"joules": 0.25, "whole_joules": 0.3, "watts": 12.0, "idle_watts": 2.0, "parts": "CPU"}


def test_a_divided_model_has_the_figures_of_rank_0() -> None:
    found = finished([(0.01, 1)] * 9, "length", False)
    assert "ranks" not in dict(table(found))
    divided = replace(found, model=SimpleNamespace(**vars(MODEL) | {"ranks": ("rank 0 (a): 50 %", "rank 1 (b): 50 %")}))
    assert dict(table(divided))["ranks"] == "2; bytes, bandwidth, roofline and memory are those of rank 0"
    assert " on rank 0 of 2." in document(divided, with_steps=False)["explanation"]


def test_the_decode_panel_has_the_figures_of_the_summary() -> None:
    from headrace.app.tui.metrics.live import LiveMetrics
    from headrace.runtime.metrics.telemetry import StepRecord

    fields = {"active_memory_bytes": 0, "peak_memory_bytes": 0}
    waits = [(0.5, 1), (0.004, 3), (0.006, 1), (0.005, 2)]
    said = report(waits, "stop", True)
    live = LiveMetrics()
    live.submitted()
    names = StepRecord.__struct_fields__
    live.take([delta_of([StepRecord(**{name: step[name] for name in names} | fields) for step in said["steps"]])])
    assert live.rate_average == pytest.approx(said["decode_tokens_per_second"])
