"""Predictions as terminal tables, or in full and without colour elsewhere."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from headrace.app.output.document import Document
from headrace.app.output.tables import Column, print_apart
from headrace.app.output.terminal import console
from headrace.app.predict.uses import STAR, legend
from headrace.runtime.metrics.units import format_bytes, percent, speed_text

_FITS = {True: "yes", False: "no", None: "?"}


def show_prediction(document: Document) -> None:
    """Print a row per target, then the changes that help."""
    model = document["model"]
    targets = document["targets"]
    contexts = document["contexts"]
    by_target = [target["predictions"] for target in targets]
    speeds = []
    for number, context in enumerate(contexts):
        at = f" @{context}" if len(contexts) > 1 else ""
        name = "tok/s" if at else "expected"
        rooflines = [speed_text(predictions[number]["roofline"]) for predictions in by_target]
        speeds.append(Column(f"roofline{at}", rooflines, leaves=1))
        speeds.append(Column(f"{name}{at}", [_expected(predictions[number]) for predictions in by_target]))
        if any(predictions[number]["measured"] for predictions in by_target):
            speeds.append(Column(f"measured{at}", [_measured(predictions[number]) for predictions in by_target]))
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
    rows = [
        prediction["measured"]
        for target in document["targets"]
        for prediction in target["predictions"]
        if prediction["measured"]
    ]
    return list(dict.fromkeys(f"measured on {row['chip']}, {row['date']}, headrace {row['headrace']}" for row in rows))


def show_users(document: Document) -> None:
    """Print a row per target and number of users: memory, total and per-user speed, and the bottleneck."""
    rows = [(target, prediction) for target in document["targets"] for prediction in target["predictions"]]
    print_head(document["model"])
    names = [target["name"] if prediction is target["predictions"][0] else "" for target, prediction in rows]
    print_apart(
        Column("chip", [_chip(name) for name in names], right=False),
        Column("users", [str(prediction["batch"]) for _, prediction in rows]),
        Column("memory", [format_bytes(prediction["memory"]) for _, prediction in rows], leaves=2),
        Column("fits", [_FITS[prediction["fits"]] for _, prediction in rows], right=False),
        Column("roofline", [speed_text(prediction["roofline"]) for _, prediction in rows], leaves=4),
        Column("expected", [_expected(prediction) for _, prediction in rows]),
        Column("per user", [_per_user(prediction) for _, prediction in rows]),
        Column("bound by", [prediction["bound"] for _, prediction in rows], right=False),
        Column("weights", [format_bytes(prediction["weight_bytes"]) for _, prediction in rows], leaves=3),
        Column("K/V", [format_bytes(prediction["kv_bytes"]) for _, prediction in rows], leaves=3),
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
    speed = prediction["expected_per_user"] or prediction["roofline_per_user"]
    return "–" if prediction["fits"] is False else speed_text(speed)


def show_acceptance(document: Document) -> None:
    """Print a row per target: the gain of speculation, and the acceptance rate from which it pays."""
    targets = document["targets"]
    best = [next((row for row in target["guesses"] if row["guesses"] == target["best"]), None) for target in targets]
    print_head(document["model"])
    print_apart(
        Column("chip", [_chip(target["name"]) for target in targets], right=False),
        Column("tok/s", [_about(target, target["tokens_per_second"]) for target in targets]),
        Column("at most", [_about(target, target["tokens_per_second_guessing"]) for target in targets]),
        Column("gain", ["–" if target["gain"] is None else f"{target['gain']:.2f}x" for target in targets]),
        Column("drafts", ["–" if target["best"] is None else str(target["best"]) for target in targets], leaves=1),
        Column("tok/step", [f"{row['tokens_per_step']:.2f}" if row else "" for row in best], leaves=3),
        Column("step cost", [f"{row['cost']:.2f}x" if row else "" for row in best], leaves=2),
        Column("4 pay from", [_pays_from(target, 4) for target in targets], leaves=4),
    )
    print_notes(
        [
            f"{document['context']:,} tokens in the cache; at most: with the best number of draft tokens per step",
            "4 pay from: the acceptance rate from which 4 draft tokens per step pay",
            *(["≤: roofline, an upper bound"] if _any_roofline(targets) else []),
            *document["assumptions"],
            "`headrace bench --speculate` measures the cost of draft tokens on this machine",
        ]
    )


def _any_roofline(targets: list[Document]) -> bool:
    return not all(target["is_expected"] for target in targets)


def _about(target: Document, speed: float | None) -> str:
    if speed is None:
        return "–"
    return speed_text(speed) if target["is_expected"] else f"≤{speed_text(speed)}"


def _pays_from(target: Document, drafts: int) -> str:
    if not target["guesses"]:
        return "–"
    break_even = next(row["break_even"] for row in target["guesses"] if row["guesses"] == drafts)
    return "never" if break_even is None else percent(break_even)


def show_fit(document: Document) -> None:
    """Print a row per model: memory, speed, largest context."""
    target = document["target"]
    rows = document["models"]
    usable = target["usable_memory_bytes"]
    room = f", {format_bytes(usable)} for models" if usable else ""
    screen = _screen()
    screen.print()
    screen.print(Text.assemble((target["name"], "bold"), f"  {target['bandwidth_gb_s']:.0f} GB/s{room}"))
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
    uses = {row["model"]: row["recommended_for"] for row in rows if row["recommended_for"]}
    notes = [f"tok/s and memory with {document['context']:,} tokens in the cache", *document["assumptions"]]
    print_notes([legend(uses), *notes] if uses else notes)


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
    return f"{chip['fp16_tflops']:.3g}" if chip["fp16_tflops"] else ""


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
    fits = document["as_is"]["fits"] is not False
    if not document["changes"]:
        print_notes([f"no known change makes it {'faster' if fits else 'fit'} on {document['target']}", ""])
        return
    rows = [{"name": "as it is", **document["as_is"]}, *document["changes"]]
    gains = "Possible gains" if fits else "Changes that make it fit"
    _title(f"{gains} on {document['target']}")
    print_apart(
        Column("change", [row["name"] for row in rows], right=False),
        Column("memory", [format_bytes(row["memory"]) for row in rows], leaves=2),
        Column("roofline", [speed_text(row["roofline"]) for row in rows], leaves=1),
        Column("expected", [_expected(row) for row in rows]),
        Column("gain", [f"{row['gain']:.2f}x" if row.get("gain") else "" for row in rows]),
    )


def print_head(model: Document) -> None:
    """Print a model's name and sizes."""
    facts = (
        f"{model['parameters'] / 1e9:.2f} B weights, {format_bytes(model['weight_bytes_per_step'])} per step, "
        f"{format_bytes(model['kv_bytes_per_token'])} of K/V per token"
    )
    screen = _screen()
    screen.print()
    screen.print(Text.assemble((model["name"], "bold"), f"  {facts}"))


def _title(text: str) -> None:
    console().print(Text(text, style="bold cyan"))


def _expected(prediction: Document) -> str:
    return "–" if prediction["expected"] is None else speed_text(prediction["expected"])


def _context(target: Document, model: Document) -> str:
    longest = target["largest_context"]
    if longest is None:
        return "unknown"
    if longest == 0:
        return "does not fit"
    return f"{longest:,}" + (" (all)" if longest == model["context_length"] else "")


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
