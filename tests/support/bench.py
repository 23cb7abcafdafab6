"""Entries of benchmark documents with unknown figures, for tests that need few of them."""

from typing import Any

from headrace.app.bench.measure.records import (
    SCHEMA,
    Device,
    Latencies,
    ModelEntry,
    RepetitionFigures,
    Result,
    RunDocument,
    Speed,
)
from headrace.runtime.machine.hardware import PowerState


def bench_result(**fields: Any) -> Result:
    """Return an entry of `results` with these fields; others are unknown or zero."""
    speed = Speed(1.0, 0.0, 1.0, None, None)
    unknown = dict.fromkeys(
        ("ttft_ms", "weight_bytes_per_step", "kv_bytes_per_step", "achieved_bandwidth_gb_s", "mbu", "mbu_nominal",
         "roofline_tokens_per_second", "arithmetic_intensity", "achieved_gflop_s", "peak_memory_bytes", "drift"),
    )  # fmt: skip
    known = {
        "test": "tg4", "depth": 0, "model": "m", "engine": "headrace", "prompt_tokens": 0, "generated_tokens": 4,
        "tokens_per_second": speed, "itl_ms": Latencies(), "samples": [], "repetitions": [], "notes": [],
    }  # fmt: skip
    return Result(**{**unknown, **known, **fields})


def repetition_figures(speed: float, memory_gb_s: float | None = None, own: float | None = None) -> RepetitionFigures:
    """Return an entry of `repetitions`. own: the peer's own figure."""
    return RepetitionFigures(
        began_s=0.0,
        tokens_per_second=speed,
        typical_tokens_per_second=speed,
        memory_gb_s=memory_gb_s,
        prefill_s=0.0,
        ttft_s=None,
        itl_ms=[],
        own_tokens_per_second=own,
    )


def run_document(results: list[Result], **fields: Any) -> RunDocument:
    """Return a document of these results on a made-up machine."""
    device = Device(
        name="simulated", backend="cpu", os="None", measured_peak_gb_s=45.0, nominal_peak_gb_s=None,
        measured_peak=None, kernels={}, power=PowerState(None, None, None, None),
    )  # fmt: skip
    model = ModelEntry(
        name="m", quantization=None, sha256=None, headers_sha256=None, weight_bytes_per_step=0, kv_bytes_per_token=0
    )
    known = {
        "schema": SCHEMA, "created": "", "command": "", "interrupted": False, "rounds": 1, "device": device,
        "model": model, "versions": {}, "results": results, "step_cost": None, "ratios": [], "peer_agreement": [],
        "profile": None, "notes": [],
    }  # fmt: skip
    return RunDocument(**{**known, **fields})
