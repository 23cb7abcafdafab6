"""Predictions on the screen: rich tables on a terminal, the same tables without colour elsewhere."""

from typing import TYPE_CHECKING, Any

from headrace.app.bench.show.live import console
from headrace.runtime.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

Document = dict[str, Any]
_PIPE_WIDTH = 140  # columns where nobody looks, so that nothing is cut


def show_prediction(document: Document) -> None:
    """One row a target, then what would help."""
    model = document["model"]
    screen = _screen()
    contexts = document["contexts"]
    speeds = [f"tok/s @{context}" for context in contexts] if len(contexts) > 1 else ["expected"]
    table = _table("chip", "GB/s", "roofline", *speeds, "max context")
    for target in document["targets"]:
        found = target["predictions"]
        style = "bold" if target["name"] == "this machine" else ""
        table.add_row(
            target["name"], f"{target['bandwidth_gb_s']:.0f}", _short(found[-1]["roofline"]), *map(_expected, found),
            _context(target, model), style=style,
        )  # fmt: skip
    _head(screen, model)
    screen.print(table)
    _show_levers(screen, document["levers"])
    _notes(screen, [f"tok/s with {max(contexts):,} tokens in the cache", *document["assumptions"]])


def show_fit(document: Document) -> None:
    """One row a model: whether it fits, how fast, how far."""
    from rich.text import Text

    screen = _screen()
    target = document["target"]
    usable = target["usable_memory_bytes"]
    room = f", {format_bytes(usable)} for models" if usable else ""
    screen.print()
    screen.print(Text.assemble((target["name"], "bold"), f"  {target['bandwidth_gb_s']:.0f} GB/s{room}"))
    table = _table("model", "bits", "memory", "", "roofline", "expected", "max context")
    for row in document["models"]:
        fits = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}[row["fits"]]
        longest = "" if row["largest_context"] is None else f"{row['largest_context']:,}"
        style = "dim" if row["fits"] is False else ""
        table.add_row(
            row["model"], row["quantization"], format_bytes(row["memory"]), Text(fits[0], style=fits[1]),
            _short(row["roofline"]), _expected(row), longest if row["fits"] is not False else "", style=style,
        )  # fmt: skip
    screen.print(table)
    _notes(screen, [f"tok/s and memory with {document['context']:,} tokens in the cache", *document["assumptions"]])


def show_explanation(document: Document) -> None:
    """Every read of a step, and of a prefill: beside each other where there is room, else below each other."""
    screen = _screen()
    _head(screen, document["model"])
    step = _cost_table(f"One decode step with {document['past']:,} tokens in the cache", document["step"])
    prefill = _cost_table(f"Prefill of {document['prefill_tokens']:,} tokens", document["prefill"])
    if screen.width >= 164:
        from rich.columns import Columns

        screen.print(Columns([step, prefill], padding=(0, 4)))
    else:
        screen.print(step)
        screen.print(prefill)
    _notes(
        screen,
        [
            "bytes and FLOPs are of one; the total counts each row as often as it says",
            "a multiplication and an addition are two FLOPs; softmax, norms and rotation are not counted",
            "a prefill makes no logits: the first decode step does",
        ],
    )


def _cost_table(title: str, costs: Document) -> "Table":
    table = _table("read", "×", "shape", "bytes", "FLOPs", "FLOP/B")
    table.title, table.title_justify, table.title_style = title, "left", "bold cyan"
    for row in costs["operations"]:
        table.add_row(
            row["name"], str(row["count"]), row["shape"], f"{row['nbytes']:,}", f"{row['flops']:,}",
            _intensity(row["intensity"]),
        )  # fmt: skip
    table.add_section()
    total = (f"{costs['total_bytes']:,}", f"{costs['total_flops']:,}", _intensity(costs["intensity"]))
    table.add_row("total", "", "", *total, style="bold")
    return table


def _show_levers(screen: Any, found: Document) -> None:
    as_is = found["as_is"]
    table = _table(f"what would help {found['target']}", "memory", "roofline", "expected", "gain")
    base = as_is["expected"] or as_is["roofline"]
    for row in ({"name": "as it is", **as_is}, *found["changes"]):
        gain = (row["expected"] or row["roofline"]) / base
        shown = "" if row["name"] == "as it is" else f"{gain:.2f}x"
        table.add_row(row["name"], format_bytes(row["memory"]), _short(row["roofline"]), _expected(row), shown)
    screen.print(table)


def _head(screen: Any, model: Document) -> None:
    from rich.text import Text

    facts = (
        f"{model['parameters'] / 1e9:.2f} B weights, {format_bytes(model['weight_bytes_per_step'])} per step, "
        f"{format_bytes(model['kv_bytes_per_token'])} of K/V per token"
    )
    screen.print()
    screen.print(Text.assemble((model["name"], "bold"), f"  {facts}"))


def _table(first: str, *columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _expected(found: Document) -> str:
    return "–" if found["expected"] is None else _short(found["expected"])


def _context(target: Document, model: Document) -> str:
    longest = target["largest_context"]
    if longest is None:
        return "unknown"
    if longest == 0:
        return "does not fit"
    return f"{longest:,}" + (" (all)" if longest == model["context_length"] else "")


def _short(value: float) -> str:
    """Three significant digits: a prediction has no more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _intensity(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _notes(screen: Any, lines: list[str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for line in lines:
        screen.print(Padding(Text(line, style="dim"), (0, 0, 0, 1)))


def _screen() -> Any:
    screen = console()
    if not screen.is_terminal:
        screen.width = _PIPE_WIDTH
    return screen
