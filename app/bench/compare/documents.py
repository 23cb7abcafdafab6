"""Comparison of two documents by test: the speed of B relative to A, and its significance.

It compares typical speeds (`app.bench.measure.sample`) at equal memory speed (`app.bench.compare.significance`). The
rate of false alarms over all tests of a comparison is at most one in twenty.
"""

from collections.abc import Callable

from headrace.app.bench.compare.significance import Difference, difference, holm
from headrace.app.output.document import Document

_WIDE = 4.0  # ends of an interval this many times apart leave the ratio unknown


def compare_documents(a: Document, b: Document) -> Document:
    """Return {tests: [...], only_in_a, only_in_b, differences: of device, model, versions ...}."""
    ours = {_key(entry): entry for entry in a["results"]}
    theirs = {_key(entry): entry for entry in b["results"]}
    shared = [key for key in ours if key in theirs]
    differences = {key: difference(_pairs(ours[key]), _pairs(theirs[key])) for key in shared}
    known = [key for key in shared if differences[key] is not None]
    significant = dict(zip(known, holm([value.p for key in known if (value := differences[key])]), strict=True))
    return {
        "a": {"created": a["created"], "command": a["command"]},
        "b": {"created": b["created"], "command": b["command"]},
        "tests": [_row(ours[key], theirs[key], differences[key], significant.get(key, False)) for key in shared],
        "only_in_a": [_name(key) for key in ours if key not in theirs],
        "only_in_b": [_name(key) for key in theirs if key not in ours],
        "differences": _circumstances(a, b),
    }


def _row(a: Document, b: Document, compared: Difference | None, significant: bool) -> Document:
    figures: Document = dict.fromkeys(("ratio", "low", "high", "p", "memory_slope"))
    if compared is None:
        verdict = "too few repetitions"
    elif compared.high > _WIDE * compared.low:
        verdict = "no result"
    else:
        figures = {key: getattr(compared, key) for key in ("ratio", "low", "high", "p")}
        figures["memory_slope"] = compared.slope
        verdict = "no difference"
        if significant:
            verdict = "faster" if compared.ratio > 1 else "slower"
    return {
        "engine": a["engine"],
        "model": a["model"],
        "test": a["test"],
        "depth": a["depth"],
        "a_tokens_per_second": a["tokens_per_second"]["mean"],
        "b_tokens_per_second": b["tokens_per_second"]["mean"],
        **figures,
        "verdict": verdict,
    }


def _pairs(entry: Document) -> list[tuple[float, float | None]]:
    return [(repetition["typical_tokens_per_second"], repetition["memory_gb_s"]) for repetition in entry["repetitions"]]


def _key(entry: Document) -> tuple[str, str, str, int]:
    return entry["engine"], entry["model"], entry["test"], entry["depth"]


def _name(key: tuple[str, str, str, int]) -> str:
    engine, model, test, depth = key
    return f"{engine} {model} {test}" + (f" @ d{depth}" if depth else "")


def _circumstances(a: Document, b: Document) -> list[str]:
    """Return other differences that could explain a change in speed."""
    facts: dict[str, Callable[[Document], object]] = {
        "device": lambda d: d["device"]["name"],
        "backend": lambda d: d["device"]["backend"],
        "kernels": lambda d: d["device"]["kernels"].get("kernels"),
        "model": lambda d: d["model"].get("headers_sha256"),
        "versions": lambda d: d["versions"],
    }
    lines = []
    for name, get in facts.items():
        if get(a) == get(b):
            continue
        if name == "model":  # hashes tell a reader nothing
            lines.append("model differs")
        else:
            lines.append(f"{name}: {get(a)} and {get(b)}")
    peaks = [document["device"]["measured_peak_gb_s"] for document in (a, b)]
    if all(peaks) and abs(peaks[1] / peaks[0] - 1) > 0.05:
        lines.append(f"memory: {peaks[0]:.1f} and {peaks[1]:.1f} GB/s; ratios are for equal memory speed")
    return lines
