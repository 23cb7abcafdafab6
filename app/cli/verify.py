"""`headrace verify`: does an answer depend on who is beside it? Exit code 1 if it does, 130 after Ctrl-C."""

import sys

import click

from headrace.app.cli.completion import model_names
from headrace.app.cli.json_output import print_json
from headrace.app.config.kv_option import kv_option


@click.command()
@click.option("-m", "--model", metavar="MODEL", shell_complete=model_names, help="As for run.")
@click.option("--tokens", type=click.IntRange(2, 1 << 20), default=24, metavar="N", help="Of every answer [24].")
@click.option("--sequences", type=click.IntRange(1, 256), default=16, metavar="N", help="Side by side [16].")
@click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Of the prompts and who joins when [0].")
@kv_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--force", is_flag=True, help="Load even if memory looks too small.")
def verify(
    model: str | None, tokens: int, sequences: int, seed: int, kv: str | None, as_json: bool, force: bool
) -> int:
    """Check that what a sequence says does not depend on others, on chunks of its prompt, or on threads."""
    from headrace.app.cli.load_for_answers import load_noted, resolved_model
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.output.terminal import table_width
    from headrace.app.verify.checks import Plan
    from headrace.app.verify.report import show
    from headrace.app.verify.run import verify as run_checks

    settings = load_settings()
    resolved = resolved_model(chosen_model(model, settings), quiet=as_json)
    loaded = load_noted(resolved, context=None, kv=kv or settings.chat.kv, force=force)
    found = run_checks(loaded, Plan(tokens, sequences, seed))
    if as_json:
        print_json(found)
    else:
        show(found, table_width(sys.stdout))
    return 130 if found["interrupted"] else 0 if found["passed"] else 1
