"""`--report`: a run as one self-contained HTML page with plots, without scripts or fetched parts.

Plots are in `charts.py`, the table's columns in `columns.py` (those with an `html` heading). All text is escaped.

Guards: tests/app/bench/test_views.py and tests/app/cli/test_bench.py.
"""

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from headrace.app.bench.measure.records import Result, RunDocument
from headrace.app.bench.show.columns import RESULT_COLUMNS, ResultColumn, mbu_cell
from headrace.app.bench.show.formats import circumstances
from headrace.app.bench.show.phrases import energy_cell, label
from headrace.app.output.output_file import check_output
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import speed_text

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --card: #ffffff; --ink: #22252a; --faint: #c9ccd1; --soft: #6a7078;
  --series-1: #1f6fb2; --series-2: #c8641e; --series-3: #2f8a57; --series-4: #8d4fb0; --series-5: #b23a48;
  --series-6: #67727f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --card: #1b1f25; --ink: #e4e7eb; --faint: #41474f; --soft: #9aa2ac;
    --series-1: #5fb0f0; --series-2: #f0a05a; --series-3: #62c48c; --series-4: #c48ae6; --series-5: #ef7683;
    --series-6: #a3afbc; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .25rem; }
header p, figcaption, footer { color: var(--soft); margin: .25rem 0 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
.tile, figure { background: var(--card); border: 1px solid var(--faint); border-radius: .6rem; padding: 1rem; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; } .tile span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } svg { width: 100%; height: auto; } figcaption { font-size: .85rem; margin: 0; }
body, td { overflow-wrap: anywhere; }
table { margin: 1.5rem 0; border-collapse: collapse; width: 100%; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .45rem; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
@media (max-width: 72rem) {
  table, tbody { display: block; } tr.head { display: none; }
  tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .2rem 1rem;
    background: var(--card); border: 1px solid var(--faint); border-radius: .6rem; padding: .75rem;
    margin: 0 0 .75rem; }
  td { display: block; padding: 0; border: 0; text-align: left; white-space: normal; }
  td:first-child { font-weight: 600; } td:first-child, td:nth-child(2) { grid-column: 1 / -1; }
  td:empty { display: none; }
  td[data-name]::before { content: attr(data-name); display: block; color: var(--soft); font-size: .75rem; }
}
footer { font-size: .85rem; } footer ul { padding-left: 1.2rem; } footer li { margin: .15rem 0; }
"""


def check_report_path(path: Path) -> None:
    """Raise UsageError if no page could be drawn or written; called before a run, which takes minutes."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--report draws with matplotlib, which is not installed",
            "`pip install '.[report]'` in the clone, or `pip install matplotlib`",
        )
    check_output(path, "--report")


def html(document: RunDocument) -> str:
    """Return the page."""
    plots = _plots(document)
    model = document.model
    device = document.device
    title = f"{model.name} on {device.name}"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body>",
            f"<header><h1>{escape(title)}</h1><p>{escape(device.backend)}, "
            f"{escape(device.kernels_name)} kernels, {escape(document.created)}</p></header>",
            _tiles(document),
            f'<div class="plots">{"".join(plots)}</div>',
            _table(document.results),
            "<footer><ul>",
            *(f"<li>{escape(line)}</li>" for line in circumstances(document)),
            "</ul><p>Bandwidth, MBU and FLOPs are computed from shapes and latencies, not read from a counter.</p>",
            "</footer>",
            "</body></html>",
        ]
    )


def _plots(document: RunDocument) -> list[str]:
    from headrace.app.bench.show import charts

    results = document.results
    peak = document.device.measured_peak_gb_s
    drawn = (
        (charts.speed_by_depth(results), "Decode speed by depth", "Bands are 95 % intervals; dashed is the roofline."),
        (charts.latency_distribution(results), "Step latency", "Cumulative share of steps by latency."),
        (
            charts.roofline(results, peak, document.device.compute_gflop_s),
            "Roofline",
            "Tests near the slope are bound by memory, near the level line by arithmetic, far below both by overhead.",
        ),
        (charts.bytes_per_step(results), "Bytes per step", "Bytes read and written by one decode step."),
        (charts.comparison(document.ratios), "Against peers", "Same weights, same lengths, measured side by side."),
        (
            charts.parts(document.profile) if document.profile is not None else None,
            "Time of one step",
            "Measured part by part.",
        ),
    )
    return [
        f"<figure><h2>{title}</h2>{svg}<figcaption>{caption}</figcaption></figure>"
        for svg, title, caption in drawn
        if svg
    ]


def _tiles(document: RunDocument) -> str:
    """Return the headline figures: of the first decode test and the first prefill."""
    entries = [entry for entry in document.results if entry.engine == "headrace"]
    decode = next((entry for entry in entries if entry.is_decode), None)
    prefill = next((entry for entry in entries if not entry.generated_tokens), None)
    tiles = []
    if decode:
        tiles.append((f"{speed_text(decode.tokens_per_second.mean)} tok/s", f"decode, {label(decode)}"))
        if (used := mbu_cell(decode)) != "":
            tiles.append((used, "of the measured memory bandwidth (MBU)"))
        if decode.roofline_tokens_per_second:
            tiles.append((f"{speed_text(decode.roofline_tokens_per_second)} tok/s", "roofline"))
        if energy := energy_cell(decode):
            tiles.append((energy, "per token, net of idle power"))
    if prefill:
        tiles.append((f"{speed_text(prefill.tokens_per_second.mean)} tok/s", f"prefill, {label(prefill)}"))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _table(results: Sequence[Result]) -> str:
    figures = [column for column in RESULT_COLUMNS if column.html is not None]
    head = ["test", "engine", *(column.html for column in figures)]
    rows = "".join(f"<tr>{''.join(_cells(entry, figures))}</tr>" for entry in results)
    return f'<table><tr class="head">{"".join(f"<th>{name}</th>" for name in head)}</tr>{rows}</table>'


def _cells(entry: Result, figures: Sequence[ResultColumn]) -> list[str]:
    """Return the cells of a row. On narrow screens figures are labelled; test and engine need no label."""
    names = [label(entry), f"{entry.engine} {entry.model}"]
    return [
        *(f"<td>{escape(name)}</td>" for name in names),
        *(f'<td data-name="{escape(str(column.html))}">{escape(column.html_cell(entry))}</td>' for column in figures),
    ]
