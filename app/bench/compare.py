"""Benchmark documents: read from files, and two of them compared by test.

Files may be edited, truncated or of another kind: `checked` is the only way from JSON to a `RunDocument`. Documents of
older versions stay readable: a new field of `records.py` needs a default.

A comparison gives the speed of B relative to A, and its significance. It compares typical speeds
(`app.bench.measure.sample`) at equal memory speed. The rate of false alarms over all tests of a comparison is at most
one in twenty.

Guards: tests/app/bench/test_compare.py and test_stats.py.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.bench.measure.records import SCHEMA, Result, RunDocument
from headrace.app.bench.stats import student_cdf, student_quantile
from headrace.app.config.bounded_input import DOCUMENT, decoded, read_bounded
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import UsageError

_SAME_MEMORY = 0.05  # relative difference of memory peaks that is not worth a line
_WIDE = 4.0  # ends of an interval this many times apart leave the ratio unknown
_MAX_MARGIN = 300.0  # in logarithms, so that it has an exponential
_SHOWN = 80  # characters of a wrong value
_HINT = "`headrace bench --json > FILE` writes a whole document"

Speeds = Sequence[tuple[float, float | None]]
"""(tokens per second, GB/s of memory around it) of each repetition; None: memory was not read."""
Verdict = Literal["faster", "slower", "no difference", "no result", "too few repetitions"]


class Difference(Struct, frozen=True):
    """Speeds of run B over those of run A.

    ratio: at equal memory speed.
    low, high: its 95 % interval.
    p: two-sided, of a ratio of 1.
    slope: part of a change in memory speed that the speeds follow, 0 to 1.
    """

    ratio: float
    low: float
    high: float
    p: float
    slope: float


class ComparedRun(Struct, frozen=True):
    created: str
    command: str


class ComparedTest(Struct, frozen=True, kw_only=True):
    """A test of both runs. The figures after the speeds are None without a result.

    engine, model, test, depth: name the test.
    a_tokens_per_second, b_tokens_per_second: as measured.
    ratio: B over A at equal memory speed.
    low, high: its 95 % interval.
    p: of a ratio of 1.
    memory_slope: part of a change in memory speed that the test's speed follows.
    verdict: `faster` or `slower` for a significant difference, else `no difference` or the reason for no figures.
    """

    engine: str
    model: str
    test: str
    depth: int
    a_tokens_per_second: float
    b_tokens_per_second: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    memory_slope: float | None = None
    verdict: Verdict


class RunComparison(Struct, frozen=True, kw_only=True):
    """The document of `headrace bench compare`.

    a, b: the runs.
    tests: of both.
    only_in_a, only_in_b: tests of one run.
    differences: of device, model, versions and others.
    """

    a: ComparedRun
    b: ComparedRun
    tests: list[ComparedTest]
    only_in_a: list[str]
    only_in_b: list[str]
    differences: list[str]


def read_document(path: Path) -> RunDocument:
    """Return the document in `path`, the last line's if there are several. Raises UsageError for other files."""
    text = decoded(read_bounded(path, DOCUMENT), str(path))
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            document = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return checked(document, str(path))
    raise UsageError(f"{path} is not a benchmark document", "`headrace bench --json > FILE` writes one")


def checked(document: object, where: str) -> RunDocument:
    """Return parsed JSON as a document. Raises UsageError if it has another schema, or not all of ours."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = None
        if isinstance(document, dict):
            schema = document.get("schema")
        raise UsageError(f"{where} is not a {SCHEMA} document (schema: {repr(schema)[:_SHOWN]})")
    try:
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed
        return typed(RunDocument, document)
    except UnicodeEncodeError:
        raise UsageError(f"{where}: half a surrogate pair is no text", _HINT) from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}", _HINT) from None


def compare_documents(a: RunDocument, b: RunDocument) -> RunComparison:
    """Compare the tests that both runs have."""
    ours = {_key(entry): entry for entry in a.results}
    theirs = {_key(entry): entry for entry in b.results}
    shared = [key for key in ours if key in theirs]
    differences = {key: difference(_speeds(ours[key]), _speeds(theirs[key])) for key in shared}
    p_values = {key: each.p for key, each in differences.items() if each is not None}
    significant = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return RunComparison(
        a=ComparedRun(a.created, a.command),
        b=ComparedRun(b.created, b.command),
        tests=[_compared(ours[key], theirs[key], differences[key], significant.get(key, False)) for key in shared],
        only_in_a=[_name(key) for key in ours if key not in theirs],
        only_in_b=[_name(key) for key in theirs if key not in ours],
        differences=_circumstances(a, b),
    )


def _compared(a: Result, b: Result, compared: Difference | None, significant: bool) -> ComparedTest:
    verdict = _verdict(compared, significant)
    row = ComparedTest(
        engine=a.engine,
        model=a.model,
        test=a.test,
        depth=a.depth,
        a_tokens_per_second=a.tokens_per_second.mean,
        b_tokens_per_second=b.tokens_per_second.mean,
        verdict=verdict,
    )
    if compared is None or verdict == "no result":
        return row
    return replace(
        row,
        ratio=compared.ratio,
        low=compared.low,
        high=compared.high,
        p=compared.p,
        memory_slope=compared.slope,
    )


def _verdict(compared: Difference | None, significant: bool) -> Verdict:
    if compared is None:
        return "too few repetitions"
    if compared.high > _WIDE * compared.low:
        return "no result"
    if not significant:
        return "no difference"
    return "faster" if compared.ratio > 1 else "slower"


def _speeds(entry: Result) -> Speeds:
    return [(repetition.typical_tokens_per_second, repetition.memory_gb_s) for repetition in entry.repetitions]


def _key(entry: Result) -> tuple[str, str, str, int]:
    """Return what two results must share to be compared: engine, model, test and depth."""
    return entry.engine, entry.model, entry.test, entry.depth


def _name(key: tuple[str, str, str, int]) -> str:
    engine, model, test, depth = key
    return f"{engine} {model} {test}" + (f" @ d{depth}" if depth else "")


def _circumstances(a: RunDocument, b: RunDocument) -> list[str]:
    """Return other differences that could explain a change in speed."""
    facts: dict[str, Callable[[RunDocument], object]] = {
        "device": lambda run: run.device.name,
        "backend": lambda run: run.device.backend,
        "kernels": lambda run: run.device.kernels.get("kernels"),
        "model": lambda run: run.model.headers_sha256,
        "versions": lambda run: run.versions,
    }
    lines = []
    for name, get in facts.items():
        if get(a) == get(b):
            continue
        if name == "model":  # hashes tell a reader nothing
            lines.append("model differs")
        else:
            lines.append(f"{name}: {get(a)} and {get(b)}")
    peak_a = a.device.measured_peak_gb_s
    peak_b = b.device.measured_peak_gb_s
    if peak_a and peak_b and abs(peak_b / peak_a - 1) > _SAME_MEMORY:
        lines.append(f"memory: {peak_a:.1f} and {peak_b:.1f} GB/s; ratios are for equal memory speed")
    return lines


# -- significance ------------------------------------------------------------------------------------------------------

# An analysis of covariance on logarithms: log(speed) = run + slope * log(memory speed) + noise. Both runs share the
# slope, between 0 (not bound by memory) and 1 (bound by memory alone); this removes the machine's drift. Without memory
# speeds it is the two-sample t test. Slow noise makes neighbouring repetitions alike, so the error is widened by the
# first autocorrelation of the residuals. Sources: Cox and McCullagh, "Some aspects of analysis of covariance",
# Biometrics 38(3), 1982; Bayley and Hammersley, "The effective number of independent observations in an autocorrelated
# time series", JRSS Supplement 8(2), 1946.


def difference(a: Speeds, b: Speeds) -> Difference | None:
    """Compare two samples. None for fewer than two repetitions on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    # y: logarithms of speeds; x: of memory speeds
    ya = [math.log(speed) for speed, _ in a]
    yb = [math.log(speed) for speed, _ in b]
    xa = _centred_memory(a, (*a, *b))
    xb = _centred_memory(b, (*a, *b))
    # Sums of squares and products, within the runs
    sxx = _products(xa, xa) + _products(xb, xb)
    sxy = _products(xa, ya) + _products(xb, yb)
    syy = _products(ya, ya) + _products(yb, yb)
    memory_shift = fmean(xb) - fmean(xa)
    slope = 0.0
    df = len(a) + len(b) - 2
    relative_variance = 1 / len(a) + 1 / len(b)  # variance of the shift over that of one repetition
    if sxx > 0:  # memory speeds differ, and the slope takes one degree of freedom
        slope = min(1.0, max(0.0, sxy / sxx))
        df -= 1
        relative_variance += memory_shift * memory_shift / sxx
    df = max(df, 1)
    shift = fmean(yb) - fmean(ya) - slope * memory_shift
    squared_residuals = max(0.0, syy - 2 * slope * sxy + slope * slope * sxx)
    variance = squared_residuals / df * _inflation([_residuals(xa, ya, slope), _residuals(xb, yb, slope)])
    error = math.sqrt(variance * relative_variance)
    if error == 0:
        margin = 0.0
        p = 1.0 if shift == 0 else 0.0
    else:
        margin = min(_MAX_MARGIN, student_quantile(0.975, df) * error)
        p = 2 * (1 - student_cdf(abs(shift) / error, df))
    return Difference(math.exp(shift), math.exp(shift - margin), math.exp(shift + margin), p, slope)


def _residuals(x: Sequence[float], y: Sequence[float], slope: float) -> list[float]:
    """Return a side's residuals in the order of measurement."""
    mean_x = fmean(x)
    mean_y = fmean(y)
    return [v - mean_y - slope * (u - mean_x) for u, v in zip(x, y, strict=True)]


def _inflation(sides: Sequence[Sequence[float]]) -> float:
    """Return the variance inflation of a mean by autocorrelation r: (1 + r) / (1 - r), at least 1.

    r is corrected for its bias in short series (Kendall, 1954). It counts as at most 0.9, an inflation of 19: towards 1
    it would grow without bound, by a coefficient that a short series cannot tell so exactly.
    """
    squares = sum(residual * residual for side in sides for residual in side)
    if squares == 0:
        return 1.0
    biased = sum(first * second for side in sides for first, second in pairwise(side)) / squares
    mean_count = sum(map(len, sides)) / len(sides)
    r = min(0.9, max(0.0, biased + (1 + 3 * biased) / mean_count))
    return (1 + r) / (1 - r)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which tests are significant with a family-wise error of at most 5 % (Holm, 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    significant = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > 0.05 / (len(p_values) - rank):
            break
        significant[i] = True
    return significant


def _centred_memory(side: Speeds, both: Speeds) -> list[float]:
    """Return log memory speeds less their overall mean; zeros if any is unknown."""
    known = [math.log(memory) for _, memory in both if memory]
    if len(known) < len(both):
        return [0.0] * len(side)
    middle = fmean(known)
    return [math.log(memory) - middle for _, memory in side if memory]


def _products(u: Sequence[float], v: Sequence[float]) -> float:
    """Return the sum of products of deviations from the means."""
    mean_u = fmean(u)
    mean_v = fmean(v)
    return sum((x - mean_u) * (y - mean_v) for x, y in zip(u, v, strict=True))
