"""`headrace bench --quality`: options in, `app.bench.quality` does the work, results out.

Options of speed measurements do not go with it. Ctrl-C shows what is done and exits with 130.
"""

import sys
from collections.abc import Mapping
from typing import Any

import click

from headrace.app.cli.bench_forms import print_document
from headrace.runtime.errors import UsageError

_MEANT = {"models", "depths", "generates", "form", "as_json", "force", "threads", "quality", "kv", "against", "text"}


def bench_quality(ctx: click.Context, options: Mapping[str, Any]) -> int:
    """Raises UsageError for options that mean nothing here."""
    from headrace.app.bench.measure.plan import parse_counts
    from headrace.app.bench.quality.run import run
    from headrace.app.bench.quality.text import SCORED
    from headrace.app.bench.quality.variants import Options
    from headrace.app.config.settings import chosen_model, load_settings

    given = {name for name in options if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if others := sorted(given - _MEANT):
        names = {parameter.name: parameter.opts[-1] for parameter in ctx.command.params}
        raise UsageError(f"--quality measures no speed: leave out {', '.join(names[name] for name in others)}")
    models = options["models"]
    if len(models) > 1:
        raise UsageError("--quality takes one model with -m", "--against names others to hold against it")
    scored = parse_counts(options["generates"], "-n") if "generates" in given else [SCORED]
    if len(scored) > 1 or scored[0] < 2:
        raise UsageError("with --quality, -n takes one number of tokens to score, 2 or more")
    found = run(
        Options(
            model=chosen_model(models[0] if models else None, load_settings()),
            kv=None if options["kv"] is None else [name.strip() for name in options["kv"].split(",")],
            against=options["against"],
            depths=parse_counts(options["depths"], "-d") if "depths" in given else None,
            scored=scored[0],
            text=options["text"],
            force=options["force"],
        )
    )
    _print(found, "json" if options["as_json"] else options["form"])
    return 130 if found["interrupted"] else 0


def _print(document: dict[str, Any], form: str | None) -> None:
    from headrace.app.bench.quality import show
    from headrace.app.output.terminal import table_width

    writers = {"md": show.markdown, "csv": show.csv_text, "jsonl": show.json_lines}
    print_document(document, form, lambda found: show.show(found, table_width(sys.stdout)), writers)
