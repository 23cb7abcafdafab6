"""`headrace verify`: answers alone against answers in batches. Exit code 1 if they differ, 130 after Ctrl-C.

Guard: tests/app/verify/test_verify.py.
"""

import click
from msgspec import Struct
from msgspec.structs import replace

from headrace.app.cli.decorators import as_object, json_option
from headrace.app.cli.model_options import (
    LoadArguments,
    activations_option,
    hosts_options,
    kv_option,
    load_arguments,
    named_model_option,
)
from headrace.app.cli.say import print_json, say
from headrace.runtime.errors import INTERRUPTED, NotEnoughMemoryError


class VerifyArguments(Struct, frozen=True):
    """Arguments of `headrace verify`.

    tokens: of each answer.
    sequences: requests, and the most that run at a time.
    seed: of prompts and joining times.
    load: options of loading.
    """

    model: str | None
    tokens: int
    sequences: int
    seed: int
    as_json: bool
    load: LoadArguments


@click.command()
@named_model_option("Model, as for run [HEADRACE_MODEL or settings].")
@click.option("--tokens", type=click.IntRange(2, 1 << 20), default=24, metavar="N", help="Tokens per answer [24].")
@click.option("--sequences", type=click.IntRange(1, 256), default=16, metavar="N", help="Sequences in a batch [16].")
@click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Seed of prompts and joining times [0].")
@kv_option
@activations_option
@json_option
@click.option("--force", is_flag=True, help="Go beyond the memory limit.")
@hosts_options
@load_arguments
@as_object(VerifyArguments)
def verify(arguments: VerifyArguments) -> int:
    """Check that an answer is the same alone and in a batch, for any prompt chunks or threads.

    Exit code 1 if an answer differs.
    """
    from headrace.app.cli.load_for_answers import load_with_notes, resolved_model
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.verify.checks import VerifyPlan
    from headrace.app.verify.verify import show
    from headrace.app.verify.verify import verify as run_checks

    settings = load_settings()
    hosts = arguments.load.hosts
    resolved = resolved_model(chosen_model(arguments.model, settings), quiet=arguments.as_json)
    # Without the settings' context, which may be shorter than the checks need.
    spec = replace(arguments.load.spec(settings), context=None, hosts=None)
    loaded = load_with_notes(resolved, replace(spec, hosts=hosts))
    alone = None
    if hosts is not None:  # several machines are compared with this one alone, if the model fits here
        try:
            alone = load_with_notes(resolved, spec)
        except NotEnoughMemoryError as error:
            say(f"not compared with this machine alone: {error}", err=True)
    document = run_checks(loaded, VerifyPlan(arguments.tokens, arguments.sequences, arguments.seed), alone)
    if arguments.as_json:
        print_json(document)
    else:
        show(document)
    if document.interrupted:
        return INTERRUPTED
    if document.passed:
        return 0
    return 1
