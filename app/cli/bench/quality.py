"""`headrace bench --quality`: logits under K/V formats and other weights, against a reference.

Ctrl-C prints the finished conditions and exits with 130.
"""

import sys
from typing import Any

import click

from headrace.app.cli.bench.forms import print_document
from headrace.app.cli.bench.options import BenchOptions, on_command_line
from headrace.app.cli.load_for_answers import agree_to_copy
from headrace.runtime.errors import UsageError

_ACCEPTED = {
    *("models", "depths", "generates", "form", "as_json", "force", "threads", "quality", "kv", "against", "text"),
    "activations",
}


def bench_quality(ctx: click.Context, given: BenchOptions) -> int:
    """Run it and return the exit code. Raises UsageError for options of speed measurements."""
    from headrace.app.bench.measure.plan import parse_counts
    from headrace.app.bench.quality.run import run
    from headrace.app.bench.quality.text import SCORED
    from headrace.app.bench.quality.variants import Options
    from headrace.app.config.settings import chosen_model, load_settings

    typed = {str(parameter.name): parameter.opts[-1] for parameter in ctx.command.params if parameter.name}
    typed = {name: option for name, option in typed.items() if on_command_line(ctx, name)}
    if others := sorted(typed.keys() - _ACCEPTED):
        raise UsageError(f"--quality measures no speed: leave out {', '.join(typed[name] for name in others)}")
    if len(given.models) > 1:
        raise UsageError("--quality takes one model with -m", "--against names models to compare with it")
    scored = parse_counts(given.generates, "-n") if "generates" in typed else [SCORED]
    if len(scored) > 1 or scored[0] < 2:
        raise UsageError("with --quality, -n takes one number of tokens to score, 2 or more")
    model = chosen_model(given.models[0] if given.models else None, load_settings())
    for one in (model, *given.against):
        agree_to_copy(one)
    measured = run(
        Options(
            model=model,
            kv=None if given.kv is None else [name.strip() for name in given.kv.split(",")],
            coarse=given.activations in ("8", "auto"),
            against=given.against,
            depths=parse_counts(given.depths, "-d") if "depths" in typed else None,
            scored=scored[0],
            text=given.text,
            force=given.force,
            threads=given.threads,
        )
    )
    _print(measured, "json" if given.as_json else given.form)
    return 130 if measured["interrupted"] else 0


def _print(document: dict[str, Any], form: str | None) -> None:
    from headrace.app.bench.quality import show
    from headrace.app.output.terminal import table_width

    writers = {"md": show.markdown, "csv": show.csv_text, "jsonl": show.json_lines}
    print_document(document, form, lambda measured: show.show(measured, table_width(sys.stdout)), writers)
