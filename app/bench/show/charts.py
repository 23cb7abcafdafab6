"""Plots of the report: SVG drawn by matplotlib, in the page's colours.

Colours are drawn as placeholders and replaced by CSS variables, so one drawing serves light and dark pages. Text stays
text, and each drawing has a description. Each function takes entries of a benchmark document and returns SVG, or None
without data; the profile of `parts` always has some. `html_report.py` places them, and its style sheet has the
variables of `_VARIABLES`.

Guards: tests/app/bench/test_views.py.
"""

import io
import re
import zlib
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from headrace.app.bench.measure.records import Profile, Ratio, Result, Speed
from headrace.app.bench.show.phrases import label
from headrace.runtime.metrics.units import format_bytes, speed_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Placeholders matplotlib draws with -> the page's variables.
INK = "#010101"
FAINT = "#020202"
SERIES = tuple(f"#0a0a{index:02x}" for index in range(1, 7))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, 1)
}
_WIDTH = 5.4  # inches; the page scales the drawing, on a phone to two thirds
_HEIGHT = 3.6  # inches
_LEGEND_LINE = 0.22  # inches
_LONG_NAME = 28  # characters; longer legend names get a line each


def speed_by_depth(results: Sequence[Result]) -> str | None:
    """Plot median decode speed by depth, of as many engines as SERIES has, with 95 % intervals.

    The roofline is added for an engine that has one at each depth.
    """
    groups = _by_engine([entry for entry in results if entry.is_single_decode])
    if not groups:
        return None

    def draw(axes: "Axes") -> None:
        for colour, (name, entries) in zip(SERIES, groups.items(), strict=False):
            entries = sorted(entries, key=lambda entry: entry.depth)
            depths = [entry.depth for entry in entries]
            speeds = [entry.tokens_per_second for entry in entries]
            axes.plot(depths, [speed.median for speed in speeds], marker="o", color=colour, label=name)
            lows = [_end(speed, speed.low) for speed in speeds]
            highs = [_end(speed, speed.high) for speed in speeds]
            axes.fill_between(depths, lows, highs, color=colour, alpha=0.18, linewidth=0)
            roofs = [entry.roofline_tokens_per_second or 0.0 for entry in entries]
            if all(roofs):
                axes.plot(depths, roofs, linestyle="--", color=colour, alpha=0.7, label=f"{name}: roofline")
            if len(depths) == 1 and lows[0] < highs[0]:  # a band of no width: show the interval as a bar
                middle = speeds[0].median
                axes.errorbar(depths, [middle], [[middle - lows[0]], [highs[0] - middle]], color=colour, capsize=4)
        axes.set(xlabel="tokens in the cache", ylabel="tok/s", ylim=(0, None))

    texts = [
        f"{name}: "
        + ", ".join(f"{speed_text(entry.tokens_per_second.median)} tok/s at {entry.depth}" for entry in entries)
        for name, entries in groups.items()
    ]
    return _svg(draw, f"Median decode speed by tokens in the cache. {'; '.join(texts)}.")


def latency_distribution(results: Sequence[Result]) -> str | None:
    """Plot the cumulative distribution of step latencies, of as many results as SERIES has."""
    shown = [entry for entry in results if entry.is_single_decode and _latencies(entry)]
    if not shown:
        return None

    def draw(axes: "Axes") -> None:
        for colour, entry in zip(SERIES, shown, strict=False):
            ordered = sorted(_latencies(entry))
            shares = [(index + 1) / len(ordered) * 100 for index in range(len(ordered))]
            axes.step(ordered, shares, where="post", color=colour, label=f"{entry.engine} {label(entry)}")
        longest = max(entry.itl_ms.p99 or 0.0 for entry in shown)
        axes.set(xlabel="step latency, ms", ylabel="% of steps", ylim=(0, 101), xlim=(0, longest * 1.15))

    texts = [
        f"{entry.engine} {label(entry)}: median {speed_text(entry.itl_ms.p50)} ms, "
        f"p99 {speed_text(entry.itl_ms.p99)} ms"
        for entry in shown
    ]
    return _svg(draw, f"Distribution of step latencies. {'; '.join(texts)}.")


def roofline(results: Sequence[Result], peak_gb_s: float | None, ceiling_gflop_s: float | None) -> str | None:
    """Plot FLOP/s by FLOP per byte, with the limits of memory and of arithmetic."""
    shown = [
        (entry, entry.arithmetic_intensity, entry.achieved_gflop_s)
        for entry in results
        if entry.arithmetic_intensity and entry.achieved_gflop_s
    ]
    if not shown or not peak_gb_s:
        return None

    def draw(axes: "Axes") -> None:
        intensities = [intensity for _, intensity, _ in shown]
        min_intensity = min(intensities) / 2
        max_intensity = max(intensities) * 2
        ridge = max_intensity
        if ceiling_gflop_s:
            ridge = ceiling_gflop_s / peak_gb_s
            max_intensity = max(max_intensity, 2 * ridge)  # so that the level line shows
        axes.plot([min_intensity, ridge], [min_intensity * peak_gb_s, ridge * peak_gb_s], color=INK, linestyle="--",
                  label=f"memory: {peak_gb_s:.1f} GB/s")  # fmt: skip
        if ceiling_gflop_s:
            axes.plot(
                [ridge, max_intensity],
                [ceiling_gflop_s] * 2,
                color=INK,
                label=f"compute: {ceiling_gflop_s:,.0f} GFLOP/s",
            )
        for colour, kind in zip(SERIES, ("prefill", "decode"), strict=False):
            points = [point for entry, *point in shown if bool(entry.generated_tokens) == (kind == "decode")]
            axes.scatter(
                [intensity for intensity, _ in points],
                [gflop_s for _, gflop_s in points],
                color=colour, label=kind, zorder=3,
            )  # fmt: skip
        axes.set(xlabel="FLOP/byte", ylabel="GFLOP/s", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")

    limits = [f"memory {peak_gb_s:.1f} GB/s"]
    if ceiling_gflop_s:
        limits.append(f"arithmetic {ceiling_gflop_s:,.0f} GFLOP/s")
    texts = [
        f"{label(entry)}: {speed_text(gflop_s)} GFLOP/s at {speed_text(intensity)} FLOP/byte"
        for entry, intensity, gflop_s in shown
    ]
    return _svg(draw, f"Roofline: {', '.join(limits)}. {'; '.join(texts)}.")


def bytes_per_step(results: Sequence[Result]) -> str | None:
    """Plot the bytes moved per decode step: of weights and of K/V."""
    shown = [entry for entry in results if entry.is_single_decode and entry.step_bytes is not None]
    if not shown:
        return None

    def draw(axes: "Axes") -> None:
        names = [_bar_name(entry, shown) for entry in shown]
        weights = [(entry.weight_bytes_per_step or 0.0) / 2**20 for entry in shown]
        cache = [(entry.kv_bytes_per_step or 0.0) / 2**20 for entry in shown]
        axes.barh(names, weights, color=SERIES[0], label="weights", height=0.6)
        axes.barh(names, cache, left=weights, color=SERIES[1], label="K/V cache", height=0.6)
        axes.invert_yaxis()
        axes.set(xlabel="MiB per step")

    texts = [
        f"{_bar_name(entry, shown)}: weights {format_bytes(entry.weight_bytes_per_step)}, "
        f"K/V cache {format_bytes(entry.kv_bytes_per_step)}"
        for entry in shown
    ]
    return _svg(draw, f"Bytes per step. {'; '.join(texts)}.", rows=len(shown))


def comparison(ratios: Sequence[Ratio]) -> str | None:
    """Plot speeds over a peer's with 95 % intervals; a line marks equal speed."""
    if not ratios:
        return None

    def draw(axes: "Axes") -> None:
        peers = list(dict.fromkeys(ratio.base for ratio in ratios))
        for index, ratio in enumerate(ratios):
            colour = SERIES[peers.index(ratio.base) % len(SERIES)]
            axes.barh(index, ratio.ratio, color=colour, height=0.6)
            if ratio.low is not None and ratio.high is not None:
                reach = [[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]]
                axes.errorbar(ratio.ratio, index, xerr=reach, color=INK, capsize=3, fmt="none")
        axes.set_yticks(range(len(ratios)), [f"{label(ratio)} vs {ratio.base}" for ratio in ratios])
        axes.axvline(1, color=INK, linewidth=1)
        axes.invert_yaxis()
        axes.set(xlabel="times the peer's speed", xlim=(0, None))

    texts = [f"{label(ratio)}: {ratio.ratio:.2f} times {ratio.base}" for ratio in ratios]
    return _svg(draw, f"Speed against peers. {'; '.join(texts)}.", rows=len(ratios))


def parts(profile: Profile) -> str:
    """Plot one step's time by part."""

    def draw(axes: "Axes") -> None:
        names = list(profile.parts_ms)
        values = list(profile.parts_ms.values())
        axes.barh(names, values, color=SERIES[0], height=0.6)
        for index, value in enumerate(values):
            text = f"{value:.2f} ms"
            axes.annotate(text, (value, index), (4, 0), textcoords="offset points", va="center", color=INK)
        axes.invert_yaxis()
        axes.set(xlabel="ms", xlim=(0, max(values) * 1.15))

    texts = ", ".join(f"{name} {value:.2f} ms" for name, value in profile.parts_ms.items())
    return _svg(draw, f"Time of one step by part: {texts}.", rows=len(profile.parts_ms))


def _svg(draw: Callable[["Axes"], None], in_words: str, rows: int | None = None) -> str:
    """Return a drawing as an <svg> element with the description `in_words`. rows: number of bars, for the height.

    The legend stands above the axes, where it covers nothing.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    height = _HEIGHT if rows is None else max(1.6, 0.34 * rows + 0.9)  # inches: of a bar, and of the x axis
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "headrace", "font.family": "sans-serif", "font.size": 11,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": FAINT,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "grid.color": FAINT, "grid.linewidth": 0.6, "legend.frameon": False, "lines.linewidth": 2,
        "text.parse_math": False,  # names may have dollar signs
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        draw(axes)
        handles, names = axes.get_legend_handles_labels()
        if handles:
            columns = 1 if max(map(len, names)) > _LONG_NAME else 2
            figure.set_figheight(height + _LEGEND_LINE * -(-len(names) // columns))
            figure.legend(handles, names, loc="outside upper left", ncols=columns)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return _inline(out.getvalue(), in_words)


def _inline(svg: str, in_words: str) -> str:
    """Return the bare <svg> element with the page's colours and font, and unique ids."""
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(in_words)}"', 1)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    # Not every browser allows variables in attributes, all do in styles; matplotlib writes styles for all but text.
    svg = re.sub(r'(fill|stroke)="(var\([^)]*\))"', r'style="\1: \2"', svg)
    # `font: 11px 'DejaVu Sans', sans-serif` and `font-family: ...`
    svg = re.sub(r"font(?:-family)?: ?[^;\"]*'?(?:DejaVu Sans|sans-serif)[^;\"]*", "font-family: inherit", svg)
    # A page has several drawings, so the ids of each begin with a hash of it.
    mark = f"c{zlib.crc32(svg.encode()):08x}-"
    return re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{mark}", svg)


def _by_engine(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for entry in results:
        groups.setdefault(f"{entry.engine} {entry.model} {entry.test}", []).append(entry)
    return groups


def _bar_name(entry: Result, shown: Sequence[Result]) -> str:
    several = len({other.model for other in shown}) > 1
    if several:
        return f"{entry.model} {label(entry)}"
    return label(entry)


def _end(speed: Speed, end: float | None) -> float:
    """Return an end of the interval; the median for one round, which has none."""
    return speed.median if end is None else end


def _latencies(entry: Result) -> list[float]:
    return [latency for repetition in entry.repetitions for latency in repetition.itl_ms]
