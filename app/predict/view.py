"""Predictions as terminal tables, or in full and without colour elsewhere.

Each function prints one kind of document of `document.py`, and nothing else: a figure is added there first, under a key
of its --json.

Guard: tests/app/predict/test_predict.py.
"""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from headrace.app.output.document import Document
from headrace.app.output.tables import Column, print_apart
from headrace.app.output.terminal import console
from headrace.app.predict.uses import STAR, legend
from headrace.runtime.metrics.units import format_bytes, speed_text, times

FITS = {True: "yes", False: "no", None: "?"}
_UNKNOWN = "–"


def show_prediction(document: Document) -> None:
    """Print a row per target, then the changes that help."""
    model = document["model"]
    targets = document["targets"]
    contexts = document["contexts"]

    # Columns of speeds, for each context. With several, their headings name it.
    speeds = []
    for number, context in enumerate(contexts):
        suffix = ""
        name = "expected"
        if len(contexts) > 1:
            suffix = f" @{context}"
            name = "tok/s"
        rows = [target["predictions"][number] for target in targets]
        speeds.append(Column(f"roofline{suffix}", [speed_text(row["roofline"]) for row in rows], leaves=1))
        speeds.append(Column(f"{name}{suffix}", [_expected(row) for row in rows]))
        if any(row["measured"] for row in rows):
            speeds.append(Column(f"measured{suffix}", [_measured(row) for row in rows]))

    print_head(model)
    print_apart(
        Column("chip", [_chip(target["name"]) for target in targets], right=False),
        Column("GB/s", [f"{target['bandwidth_gb_s']:.0f}" for target in targets], leaves=3),
        *speeds,
        Column("max context", [_context(target, model) for target in targets], leaves=2),
    )
    _show_levers(document["levers"])
    print_notes(
        [f"tok/s with {max(contexts):,} tokens in the cache", *_measurements(document), *document["assumptions"]]
    )


def _measured(prediction: Document) -> str:
    if not prediction["measured"]:
        return ""
    return speed_text(prediction["measured"]["tokens_per_second"])


def _measurements(document: Document) -> list[str]:
    """Return a line on the origin of each measured speed's run."""
    lines = []
    for target in document["targets"]:
        for prediction in target["predictions"]:
            if run := prediction["measured"]:
                lines.append(f"measured on {run['chip']}, {run['date']}, headrace {run['headrace']}")
    return list(dict.fromkeys(lines))


def show_users(document: Document) -> None:
    """Print a row per target and number of users: memory, total and per-user speed, and the bottleneck."""
    names = []
    rows = []
    for target in document["targets"]:
        rows += target["predictions"]
        names += [target["name"], *[""] * (len(target["predictions"]) - 1)]  # a chip's name stands in its first row
    print_head(document["model"])
    print_apart(
        Column("chip", [_chip(name) for name in names], right=False),
        Column("users", [str(row["batch"]) for row in rows]),
        Column("memory", [format_bytes(row["memory"]) for row in rows], leaves=2),
        Column("fits", [FITS[row["fits"]] for row in rows], right=False),
        Column("roofline", [speed_text(row["roofline"]) for row in rows], leaves=4),
        Column("expected", [_expected(row) for row in rows]),
        Column("per user", [_per_user(row) for row in rows]),
        Column("bound by", [row["bound"] for row in rows], right=False),
        Column("weights", [format_bytes(row["weight_bytes"]) for row in rows], leaves=3),
        Column("K/V", [format_bytes(row["kv_bytes"]) for row in rows], leaves=3),
    )
    for target in document["targets"]:
        if target["most_users"] is not None:
            print_notes(
                [f"{target['name']}: {target['most_users']:,} users with {document['context']:,} tokens each fit"]
            )
    speeds = "per user: from the roofline if no speed is expected"
    print_notes(
        [f"tok/s of all users, {document['context']:,} tokens in each one's cache; {speeds}", *document["assumptions"]]
    )


def _per_user(prediction: Document) -> str:
    if prediction["fits"] is False:
        return _UNKNOWN
    return speed_text(prediction["expected_per_user"] or prediction["roofline_per_user"])


def show_fit(document: Document) -> None:
    """Print a row per model: memory, speed, largest context."""
    target = document["target"]
    rows = document["models"]
    facts = f"{target['bandwidth_gb_s']:.0f} GB/s"
    if target["usable_memory_bytes"]:
        facts += f", {format_bytes(target['usable_memory_bytes'])} for models"
    _print_head(target["name"], facts)
    marks = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}

    def column(name: str, cell: Callable[[Document], str], leaves: int = 0) -> Column:
        cells = [Text(cell(row), style="dim" if row["fits"] is False else "") for row in rows]
        return Column(name, cells, leaves, right=name != "model")

    print_apart(
        column("model", lambda row: f"{row['model']} {STAR}" if row["recommended_for"] else str(row["model"])),
        column("bits", lambda row: str(row["quantization"]), 4),
        column("memory", lambda row: format_bytes(row["memory"]), 2),
        Column("", [Text.assemble(marks[row["fits"]]) for row in rows]),
        column("roofline", lambda row: speed_text(row["roofline"]), 1),
        column("expected", _expected),
        column("max context", lambda row: f"{row['largest_context']:,}" if row["largest_context"] else "", 3),
    )
    notes = [f"tok/s and memory with {document['context']:,} tokens in the cache", *document["assumptions"]]
    if uses := {row["model"]: row["recommended_for"] for row in rows if row["recommended_for"]}:
        notes.insert(0, legend(uses))
    print_notes(notes)


def show_chips(chips: list[Document]) -> None:
    """Print a row per chip."""
    print_apart(
        Column("chip", [chip["name"] for chip in chips], right=False),
        Column("GPU cores", [" / ".join(map(str, chip["gpu_cores"])) for chip in chips], leaves=1),
        Column("GB/s", [f"{chip['bandwidth_gb_s']:,.0f}" for chip in chips]),
        Column("memory", [_chip_memory(chip) for chip in chips], leaves=2),
        Column("TFLOP/s fp16", [_chip_flops(chip) for chip in chips], leaves=3),
    )
    print_notes(
        [
            "--chip takes any unambiguous part of a name, and (N-core) for a variant",
            "TFLOP/s: nominal; of Apple's largest GPU, derived from its cores and clock",
        ]
    )


def _chip_memory(chip: Document) -> str:
    sizes = " / ".join(map(str, chip["memory_gb"]))
    if sizes:
        return f"{sizes} GB"
    if chip["max_memory_gb"]:
        return f"up to {chip['max_memory_gb']} GB"
    return ""


def _chip_flops(chip: Document) -> str:
    if chip["fp16_tflops"]:
        return f"{chip['fp16_tflops']:.3g}"
    return ""


def _chip(name: str) -> Text:
    return Text(name, style="bold" if name == "this machine" else "")


def show_explanation(document: Document) -> None:
    """Print every read of a step, then of a prefill."""
    print_head(document["model"])
    _cost_table(f"One decode step with {document['past']:,} tokens in the cache", document["step"])
    _cost_table(f"Prefill of {document['prefill_tokens']:,} tokens", document["prefill"])
    print_notes(
        [
            "bytes and FLOPs are of one; the total multiplies each row by its count",
            "a multiplication and an addition count as two FLOPs; softmax, norms and rotation are not counted",
            "a prefill computes no logits; the first decode step does",
        ]
    )


def _cost_table(title: str, costs: Document) -> None:
    rows = costs["operations"]
    total = {"nbytes": costs["total_bytes"], "flops": costs["total_flops"], "intensity": costs["intensity"]}
    _title(title)
    print_apart(
        Column("read", [*(row["name"] for row in rows), "total"], right=False),
        Column("×", [*(str(row["count"]) for row in rows), ""]),
        Column("shape", [*(row["shape"] for row in rows), ""], leaves=2),
        Column("bytes", [f"{row['nbytes']:,}" for row in (*rows, total)]),
        Column("FLOPs", [f"{row['flops']:,}" for row in (*rows, total)], leaves=1),
        Column("FLOP/B", [_intensity(row["intensity"]) for row in (*rows, total)], leaves=3),
    )


def _show_levers(document: Document) -> None:
    title = "Possible gains"
    wanted = "faster"
    if document["as_is"]["fits"] is False:
        title = "Changes that make it fit"
        wanted = "fit"
    if not document["changes"]:
        print_notes([f"no known change makes it {wanted} on {document['target']}", ""])
        return
    rows = [{"name": "as it is", "gain": None, **document["as_is"]}, *document["changes"]]
    _title(f"{title} on {document['target']}")
    print_apart(
        Column("change", [row["name"] for row in rows], right=False),
        Column("memory", [format_bytes(row["memory"]) for row in rows], leaves=2),
        Column("roofline", [speed_text(row["roofline"]) for row in rows], leaves=1),
        Column("expected", [_expected(row) for row in rows]),
        Column("gain", [times(row["gain"]) for row in rows]),
    )


def print_head(model: Document) -> None:
    """Print a model's name and sizes."""
    facts = (
        f"{model['parameters'] / 1e9:.2f} B weights, {format_bytes(model['weight_bytes_per_step'])} per step, "
        f"{format_bytes(model['kv_bytes_per_token'])} of K/V per token"
    )
    _print_head(model["name"], facts)


def _print_head(name: str, facts: str) -> None:
    screen = _screen()
    screen.print()
    screen.print(Text.assemble((name, "bold"), f"  {facts}"))


def _title(text: str) -> None:
    console().print(Text(text, style="bold cyan"))


def _expected(prediction: Document) -> str:
    return speed_text(prediction["expected"]) or _UNKNOWN


def _context(target: Document, model: Document) -> str:
    longest = target["largest_context"]
    if longest is None:
        return "unknown"
    if longest == 0:
        return "does not fit"
    if longest == model["context_length"]:
        return f"{longest:,} (all)"
    return f"{longest:,}"


def _intensity(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def print_notes(lines: list[str]) -> None:
    """Print dim lines."""
    screen = _screen()
    for line in lines:
        screen.print(Text(line, style="dim"))


def _screen() -> Console:
    """Return a console on standard output that never wraps in pipes and files."""
    screen = console()
    if not screen.is_terminal:
        screen.soft_wrap = True
    return screen
