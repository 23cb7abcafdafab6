"""`headrace verify`: answers alone against answers in batches. Exit code 1 if they differ, 130 after Ctrl-C."""

import sys
from functools import partial

import click

from headrace.app.cli.answer_options import kv_option
from headrace.app.cli.completion import model_names
from headrace.app.cli.json_output import print_json


@click.command()
@click.option(
    "-m", "--model", metavar="MODEL", shell_complete=model_names, help="Model, as for run [HEADRACE_MODEL or settings]."
)
@click.option("--tokens", type=click.IntRange(2, 1 << 20), default=24, metavar="N", help="Tokens per answer [24].")
@click.option("--sequences", type=click.IntRange(1, 256), default=16, metavar="N", help="Sequences in a batch [16].")
@click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Seed of prompts and joining times [0].")
@click.option("--server", is_flag=True, help="Compare run, batch, Python API and server instead.")
@kv_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--force", is_flag=True, help="Load even if memory looks too small.")
def verify(
    model: str | None,
    tokens: int,
    sequences: int,
    seed: int,
    server: bool,
    kv: str | None,
    as_json: bool,
    force: bool,
) -> int:
    """Check that an answer is the same alone and in a batch, for any prompt chunks or threads.

    Exit code 1 if an answer differs.
    """
    from headrace.app.cli.load_for_answers import load_noted, resolved_model
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.output.terminal import table_width
    from headrace.app.verify.checks import Plan
    from headrace.app.verify.report import show
    from headrace.app.verify.run import verify as run_checks
    from headrace.app.verify.run import verify_interfaces

    settings = load_settings()
    resolved = resolved_model(chosen_model(model, settings), quiet=as_json)
    kv = kv or settings.chat.kv
    load, plan = partial(load_noted, resolved, context=None, kv=kv, force=force), Plan(tokens, sequences, seed)
    options = [f"--kv={kv}", *(["--force"] if force else [])]
    found = verify_interfaces(load, plan, resolved.path, options) if server else run_checks(load(), plan)
    if as_json:
        print_json(found)
    else:
        show(found, table_width(sys.stdout))
    return 130 if found["interrupted"] else 0 if found["passed"] else 1
