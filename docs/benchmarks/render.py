"""Write the tables of docs/benchmarks.md and draw its plots, from the JSON files next to this script.

    python docs/benchmarks/render.py

A new figure is an entry of a JSON file. The page has a table between `<!-- table ID -->` and `<!-- end -->`; the text
between the two is replaced, so no table is edited there. An interval in the JSON is `[value, low, high]`, an unknown
figure `null`.

Guards: tests/test_readme.py compares page and JSON; tests/app/bench/test_machine_report.py for `with_measured`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.app.predict.measured import MeasuredSpeed

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "benchmarks.md"
# "<!-- table ID -->", the table's text, "<!-- end -->"
_MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Mapping[str, Any]
"""An entry of `tables` of a JSON file: id, columns, rows, date, command, notes."""

# Machines in the plots: prefix of their tables' ids, title, colour.
MACHINES = (
    ("sapphire-rapids", "Sapphire Rapids", "#c8641e"),
    ("zen4", "Zen 4", "#1f6fb2"),
    ("zen5", "Zen 5", "#2b8a3e"),
)


def machines() -> dict[str, Any]:
    """Return the content of every JSON file, by name."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(HERE.glob("*.json"))}


def tables() -> dict[str, Table]:
    """Return every table by id."""
    return {table["id"]: table for machine in machines().values() for table in machine["tables"]}


def cell(value: object, form: str) -> str:
    """Return a figure as text; an interval follows its value in parentheses."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        middle, low, high = (form.format(figure) for figure in value)
        return f"{middle} ({low.rstrip('x')} to {high.rstrip('x')})"
    return form.format(value).replace("%", " %")


def markdown(table: Table) -> str:
    """Return a table with its date, command and notes."""
    columns = table["columns"]
    table = with_measured(table)
    lines = [
        "| " + " | ".join(column["title"] for column in columns) + " |",
        "|" + "|".join("---" if column["format"] == "{}" else "---:" for column in columns) + "|",
    ]
    for row in table["rows"]:
        cells = [cell(row[column["key"]], column["format"]) for column in columns]
        coded = [f"`{text}`" if text.startswith(("python -m", "headrace ")) else text for text in cells]
        lines.append("| " + " | ".join(coded) + " |")
    below = [f"{table['date']}" + (f", `{table['command']}`" if table["command"] else "") + "."]
    if table.get("peer"):
        below.append(f"Peer: {table['peer']}.")
    below += table.get("notes", [])
    return "\n".join([*lines, "", *(f"- {note}" for note in below)]) + "\n"


def with_measured(table: Table) -> Table:
    """Return a computed table of speeds by model and chip with the measured ones in bold, from assets/measured.toml.

    Speeds are of the variant of a chip with the most bandwidth.
    """
    if not any("chips" in column for column in table["columns"]):
        return table
    from headrace.app.predict.measured import measured
    from headrace.runtime.machine import chips

    max_bandwidth: dict[str, float] = {}  # of a chip's variants
    for chip in chips.table():
        max_bandwidth[chip.name] = max(chip.bandwidth, max_bandwidth.get(chip.name, 0.0))
    speeds = {
        (speed.model, speed.chip): speed  # `measured` returns the newest last
        for speed in measured()
        if speed.depth == table["depth"] and speed.bandwidth == max_bandwidth.get(speed.chip)
    }
    rows = []
    for row in table["rows"]:
        cells = {
            column["key"]: _measured_cell(speeds[row["model"], chip])
            for column in table["columns"]
            for chip in column.get("chips", ())
            if (row["model"], chip) in speeds
        }
        rows.append({**row, **cells})
    return {**table, "rows": rows}


def _measured_cell(speed: "MeasuredSpeed") -> str:
    """Return `**98.2 : 95.1**`, the speed and mlx-lm's; without mlx-lm's, the speed alone."""
    peer = f" : {speed.tokens_per_second / speed.ratio:.3g}" if speed.ratio else ""
    return f"**{speed.tokens_per_second:.3g}{peer}**"


def rendered(page: str) -> str:
    """Return the page with every marked table replaced."""
    tables_by_id = tables()
    return _MARK.sub(lambda mark: mark[1] + markdown(tables_by_id[mark[2]]) + mark[3], page)


def speed_by_depth(axes: Any) -> None:
    """Decode speed over the tokens in the cache, per machine and engine."""
    for machine, title, colour in MACHINES:
        rows = tables()[f"{machine}-engines"]["rows"][2:5]  # decode after 0, 2,048 and 4,096 tokens
        for engine, style in (("headrace", "o-"), ("llama.cpp", "s--")):
            speeds = [row[engine] for row in rows]
            axes.plot((0, 2048, 4096), speeds, style, color=colour, label=f"{engine}, {title}")
    axes.set(xlabel="tokens in the cache", ylabel="decode, tok/s", xticks=(0, 2048, 4096), ylim=(0, None))
    axes.legend(frameon=False)


def ratios(axes: Any) -> None:
    """Ratio to llama.cpp with 95 % intervals, per test and machine."""
    labels: list[str] = []
    for machine, title, colour in MACHINES:
        tables_by_id = tables()
        rows = [(row["test"], row["ratio"]) for row in tables_by_id[f"{machine}-engines"]["rows"]]
        for row in tables_by_id.get(f"{machine}-batch", {"rows": ()})["rows"]:
            if row["over_llama"]:
                rows.append((f"8 sequences, {row['depth']:,} tokens each", row["over_llama"]))
        for test, ratio in reversed(rows):
            _interval(axes, len(labels), ratio, colour)
            labels.append(f"{test} ({title})")
    _labelled(axes, labels, "headrace over llama.cpp")


def speculation(axes: Any) -> None:
    """Gain of n-gram speculation per workload, with 95 % intervals."""
    rows = tables()["zen4-speculation"]["rows"][::-1]
    for y, row in enumerate(rows):
        _interval(axes, y, row["gain"], "#1f6fb2")
    _labelled(axes, [row["workload"] for row in rows], "speed with speculation over without")


def predictions(axes: Any) -> None:
    """Speeds predicted from shapes over the speeds others published, both in tok/s."""
    from headrace.app.predict.published import assumptions, points, predicted

    for engine, colour, shape in (("mlx-lm", "#1f6fb2", "o"), ("llama.cpp", "#c8641e", "s")):
        figures = [point for point in points() if point.engine == engine]
        assumed = assumptions(engine)
        expected = [predicted(point, assumed) for point in figures]
        published = [point.tokens_per_second for point in figures]
        axes.plot(published, expected, shape, color=colour, markersize=4, label=f"{engine} ({len(figures)} figures)")
    # The diagonal, where both are equal
    axes.plot((3, 900), (3, 900), color="#888888", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="published, tok/s", ylabel="predicted, tok/s")
    axes.legend(frameon=False)


def quality(axes: Any) -> None:
    """Speed over divergence from float32, per engine: prompts and single steps."""
    rows = tables()["zen5-quality"]["rows"]
    for row, colour in zip(rows, ("#2b8a3e", "#c8641e", "#1f6fb2", "#7a4fa3"), strict=True):
        for key, shape in (("prefill", "s"), ("decode", "o")):
            axes.plot(row["kl"][0], row[key], shape, color=colour, label=f"{row['engine']}, {key}")
    axes.set(xscale="log", yscale="log", xlabel="KL from float32, nats (left is closer)", ylabel="tok/s")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


PLOTS: Mapping[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "speed-by-depth": (speed_by_depth, (6.4, 3.6)),
    "ratios": (ratios, (7.6, 4.8)),
    "speculation": (speculation, (6.4, 2.4)),
    "quality": (quality, (6.4, 3.2)),
    "predictions": (predictions, (5.2, 4.0)),
}


def draw(folder: Path) -> Sequence[Path]:
    """Draw every plot as an SVG file in `folder`."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    written = []
    style = {"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.family": "sans-serif", "font.size": 9}
    for name, (plot, size) in PLOTS.items():
        with pyplot.rc_context(style):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            axes.spines[["top", "right"]].set_visible(False)
            plot(axes)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
        written.append(folder / f"{name}.svg")
    return written


def _interval(axes: Any, y: int, figure: Sequence[float], colour: str) -> None:
    """Draw a figure (value, low, high) at height `y`: a point and a line."""
    middle, low, high = figure
    axes.plot((low, high), (y, y), color=colour, linewidth=2)
    axes.plot(middle, y, "o", color=colour)


def _labelled(axes: Any, labels: Sequence[str], title: str) -> None:
    """Label the rows of ratios, and mark 1, where both speeds are equal."""
    axes.axvline(1, color="#888888", linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel(f"{title} (95 % intervals)")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(HERE)
