"""Means of a benchmark's decode test, for the sentence."""

from headrace.app.answer.sentence import StepFigures
from headrace.app.output.document import Document


def step_figures(document: Document, entry: Document) -> StepFigures:
    """Return a decode test's means. The bandwidth is the one that its MBU compares with."""
    device, batch, speed = document["device"], entry.get("batch", 1), entry["tokens_per_second"]["mean"]
    step_bytes = entry["weight_bytes_per_step"] + entry["kv_bytes_per_step"]
    share, base = entry["mbu"], device["measured_peak_gb_s"]
    if share and speed > 0:
        base = step_bytes * speed / batch / share / 1e9
    others = [rep["other_cpus"] for rep in entry["repetitions"] if rep.get("other_cpus") is not None]
    slowed_by = ""
    if entry.get("busy") and others:
        cores = f" of {device['cores']}" if device.get("cores") else ""
        slowed_by = f"other programs used {sum(others) / len(others):.1f}{cores} cores"
    return StepFigures(
        step_bytes=step_bytes,
        step_s=batch / speed if speed > 0 else None,
        tokens=batch,
        sequences=batch,
        memory_gb_s=base,
        measured_beside=bool(entry.get("mbu_paired")),
        step_flops=(entry["arithmetic_intensity"] or 0.0) * step_bytes,
        compute_flops=(device.get("measured_compute_gflop_s") or 0.0) * 1e9 or None,
        slowed_by=slowed_by,
        ranks=len((document.get("hosts") or {}).get("ranks", [1])),
    )
