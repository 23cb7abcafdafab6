"""`headrace predict`: how fast a model would decode, and whether it fits, from its shape alone.

`headrace fit`: the same question turned round, for every model of the catalog on one machine.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from headrace.app.cli.json_output import print_json
from headrace.app.config.kv_option import kv_option
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.predict.prediction import Target
    from headrace.models.cost.step_shape import StepShape


@click.command()
@click.option("-m", "--model", metavar="MODEL", help="As for run; nothing but a config is ever fetched.")
@click.option("--chip", "chips", multiple=True, metavar="CHIP", help='Such as "M4 Max", m4max, 4090. Repeatable.')
@click.option("--list-chips", is_flag=True, help="List the chips that are known.")
@click.option(
    "--memory", type=click.IntRange(1, 4096), metavar="GB", help="Memory of the chips. Default: the most sold."
)
@click.option(
    "--context",
    "contexts",
    default=str(DEFAULT_CONTEXT),
    show_default=True,
    metavar="N,...",
    help="Tokens in the cache.",
)
@kv_option
@click.option("--users", metavar="N,...", help="So many at a time, each with --context tokens of their own.")
@click.option(
    "--acceptance",
    type=float,
    metavar="P",
    help="What speculation gives, if a guess is right with chance P, 0 to 1.",
)
@click.option("--explain", is_flag=True, help="List every matrix and cache read of a step, and of a prefill.")
@click.option("--prefill", "prefill", type=click.IntRange(1), default=512, show_default=True, help="For --explain.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def predict(
    model: str | None,
    chips: tuple[str, ...],
    list_chips: bool,
    memory: int | None,
    contexts: str,
    kv: str | None,
    users: str | None,
    acceptance: float | None,
    explain: bool,
    prefill: int,
    as_json: bool,
) -> None:
    """Say how fast MODEL would decode on this machine or other chips, what limits it, and what would help."""
    if list_chips:
        _list_chips(as_json)
        return
    from headrace.app.bench.measure.plan import parse_counts
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.predict.document import acceptance_prediction, explanation, prediction, users_prediction
    from headrace.app.predict.targets import targets_for
    from headrace.models.registry.find_shape import find_shape

    counts = parse_counts(contexts, "--context")
    together = None if users is None else _users(users, counts, explain=explain)
    if acceptance is not None:
        _check_acceptance(acceptance, counts, other=explain or users is not None)
    settings = load_settings()
    name, shape = find_shape(chosen_model(model, settings))
    asked = [min(context, shape.context_length - 1) for context in counts]
    others, compute = together is None, together is not None or acceptance is not None
    targets = [] if explain else targets_for(chips, memory, others=others, compute=compute)
    shape = _stored(shape, kv or settings.chat.kv, targets, max(asked), max(together or [1]))
    if together is not None:
        document = users_prediction(name, shape, targets, together, asked[0])
    elif acceptance is not None:
        document = acceptance_prediction(name, shape, targets, asked[0], acceptance)
    elif explain:
        document = explanation(name, shape, past=asked[-1], prefill=prefill)
    else:
        document = prediction(name, shape, targets, list(dict.fromkeys(asked)))
    if as_json:
        print_json(document)
        return
    from headrace.app.predict import view

    if acceptance is not None:
        view.show_acceptance(document)
    else:
        (view.show_users if users else view.show_explanation if explain else view.show_prediction)(document)


def _stored(shape: "StepShape", kv: str, targets: "Sequence[Target]", context: int, sequences: int) -> "StepShape":
    """With K/V as asked; `auto`: as so many sequences with `context` tokens fit on the first target.

    Raises UsageError for a format that is none, or that nothing stores this model's K/V as.
    """
    from headrace.app.predict.prediction import fitting_kv
    from headrace.runtime.ops.kv_format import FLOAT16, kv_format

    if kv != "auto":
        known = kv_format(kv)
        if (stored := next((kind for kind in shape.kv_formats if kind.name == kv), None)) is None:
            raise UsageError(
                f"this model's K/V cannot be {known.name}",
                f"what they can be: {', '.join(kind.name for kind in shape.kv_formats)}",
            )
        return shape.with_kv(stored)
    return shape.with_kv(fitting_kv(shape, targets[0], context, sequences) if targets else FLOAT16)


def _check_acceptance(acceptance: float, contexts: Sequence[int], *, other: bool) -> None:
    if not 0 <= acceptance <= 1:
        raise UsageError("--acceptance is a chance, from 0 to 1")
    if len(contexts) > 1 or other:
        raise UsageError("--acceptance goes with one --context, and not with --users or --explain")


def _users(users: str, contexts: Sequence[int], *, explain: bool) -> list[int]:
    """How many at a time, each number once. Raises UsageError."""
    from headrace.app.bench.measure.plan import parse_counts

    counts = list(dict.fromkeys(parse_counts(users, "--users")))
    if min(counts) < 1:
        raise UsageError("--users must be at least 1")
    if len(contexts) > 1 or explain:
        raise UsageError("--users goes with one --context, and not with --explain")
    return counts


@click.command()
@click.option("--chip", metavar="CHIP", help="Another machine than this one.")
@click.option("--memory", type=click.IntRange(1, 4096), metavar="GB", help="Its memory.")
@click.option(
    "--context", type=click.IntRange(0), default=DEFAULT_CONTEXT, show_default=True, help="Tokens in the cache."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def fit(chip: str | None, memory: int | None, context: int, as_json: bool) -> None:
    """Say which models of the catalog fit this machine, and how fast each would be."""
    from headrace.app.predict.document import catalog_fit
    from headrace.app.predict.targets import targets_for

    target = targets_for((chip,) if chip else (), memory, others=False)[0]
    document = catalog_fit(target, context)
    if as_json:
        print_json(document)
        return
    from headrace.app.predict.view import show_fit

    show_fit(document)


def _list_chips(as_json: bool) -> None:
    from headrace.app.predict.document import known_chips

    chips = known_chips()
    if as_json:
        print_json(chips)
        return
    from headrace.app.predict.view import show_chips

    show_chips(chips)
