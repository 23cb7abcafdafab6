"""`headrace predict` and `headrace fit`: speed and memory of a model on a machine, from its shape alone.

`predict` is about one model on any machines, `fit` about all models of the catalog on one machine. Each makes a
document (`app.predict.document`), which --json prints as it is.

Guards: tests/app/predict/test_hosts.py and tests/app/cli/test_bench.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from headrace.app.cli.completion import chip_names
from headrace.app.cli.decorators import as_object, json_option
from headrace.app.cli.model_options import kv_option, named_model_option
from headrace.app.cli.say import print_json
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.app.predict.prediction import TargetMachine
    from headrace.models.cost.step_shape import StepShape


_memory_option = click.option(
    "--memory", type=click.IntRange(1, 4096), metavar="GB", help="Memory [this machine's, or the largest sold]."
)


class PredictArguments(Struct, frozen=True, kw_only=True):
    """Arguments of `headrace predict`, named as click names them; help texts explain them.

    contexts, users: numbers separated by commas, as typed.
    memory: GB of every machine; None: its own.
    prefill: prompt length, for --explain and --hosts.
    """

    model: str | None
    chips: tuple[str, ...]
    hosts: str | None
    link: str | None
    list_chips: bool
    memory: int | None
    contexts: str
    kv: str | None
    users: str | None
    explain: bool
    prefill: int
    as_json: bool


@click.command()
@named_model_option("Model, as for run; no weights are fetched.")
@click.option(
    *("--chip", "chips"),
    multiple=True,
    metavar="CHIP",
    shell_complete=chip_names,
    help='Chip: "M4 Max", m4max, 4090 ...; repeatable [this machine].',
)
@click.option("--hosts", metavar="CHIP,...", help='Machines that share the model: "M4 Max,2x M3 Ultra 256 GB".')
@click.option("--link", metavar="KIND", help="Link of --hosts: tb5-rdma, tb5, 10gbe or wifi [all].")
@click.option("--list-chips", is_flag=True, help="List of known chips.")
@_memory_option
@click.option(
    "--context",
    "contexts",
    default=str(DEFAULT_CONTEXT),
    metavar="N,...",
    help=f"Tokens in the cache [{DEFAULT_CONTEXT}].",
)
@kv_option
@click.option("--users", metavar="N,...", help="Numbers of users at a time, each with --context tokens.")
@click.option("--explain", is_flag=True, help="List of every matrix and cache read of a step and a prefill.")
@click.option(
    "--prefill", type=click.IntRange(1), default=512, metavar="N", help="Prompt length for --explain and --hosts [512]."
)
@json_option
@as_object(PredictArguments)
def predict(arguments: PredictArguments) -> None:
    """Predict decode speed, its limit and possible gains, on this machine or other chips."""
    if arguments.list_chips:
        _list_chips(arguments.as_json)
        return
    document = _document(arguments)
    if arguments.as_json:
        print_json(document)
        return
    from headrace.app.predict import view

    if arguments.hosts is not None:
        from headrace.app.predict.hosts_document import show_hosts

        show_hosts(document)
    elif arguments.users:
        view.show_users(document)
    elif arguments.explain:
        view.show_explanation(document)
    else:
        view.show_prediction(document)


def _document(arguments: PredictArguments) -> dict[str, object]:
    """Return the document for the options. Raises UsageError, and the errors of `find_shape`."""
    from headrace.app.bench.measure.plan import parse_counts
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.predict.document import explanation, prediction, users_prediction
    from headrace.app.predict.targets import targets_for
    from headrace.models.registry.find_shape import find_shape

    counts = parse_counts(arguments.contexts, "--context")
    if arguments.hosts is not None or arguments.link is not None:
        return _hosts_document(arguments, counts)
    users = None
    if arguments.users is not None:
        users = _parse_users(arguments.users, counts, explain=arguments.explain)
    settings = load_settings()
    name, shape = find_shape(chosen_model(arguments.model, settings))
    asked = [min(context, shape.context_length - 1) for context in counts]
    targets = []
    if not arguments.explain:  # of no machine
        targets = targets_for(arguments.chips, arguments.memory, others=users is None, compute=users is not None)
    shape = _with_kv(shape, arguments.kv or settings.chat.kv, targets, max(asked), max(users or [1]))
    if users is not None:
        return users_prediction(name, shape, targets, users, asked[0])
    if arguments.explain:
        return explanation(name, shape, past=asked[-1], prefill=arguments.prefill)
    return prediction(name, shape, targets, list(dict.fromkeys(asked)))


def _hosts_document(arguments: PredictArguments, contexts: Sequence[int]) -> dict[str, object]:
    """Return the document of `--hosts`. Raises UsageError, and the errors of `find_shape`."""
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.predict.chip_names import machine_targets
    from headrace.app.predict.hosts_document import hosts_prediction, links_between
    from headrace.models.registry.find_shape import find_shape

    if arguments.hosts is None:
        raise UsageError("--link needs --hosts")
    if arguments.chips or arguments.users or arguments.explain or len(contexts) > 1:
        raise UsageError("--hosts needs one --context, and excludes --chip, --users and --explain")
    targets = machine_targets(arguments.hosts, arguments.memory)
    over = links_between(targets, arguments.link)
    settings = load_settings()
    name, shape = find_shape(chosen_model(arguments.model, settings))
    context = min(contexts[0], shape.context_length - 1)
    shape = _with_kv(shape, arguments.kv or settings.chat.kv, [], context, 1)
    return hosts_prediction(name, shape, targets, over, context, arguments.prefill)


def _with_kv(
    shape: "StepShape", kv: str, targets: "Sequence[TargetMachine]", context: int, sequences: int
) -> "StepShape":
    """Return the shape with K/V in another format. Raises UsageError for one that the model cannot have.

    kv: name of the format; `auto`: the first in which `sequences` of `context` tokens each fit on the first target,
        float16 without targets.
    """
    from headrace.app.predict.prediction import fitting_kv
    from headrace.runtime.ops.kv_format import FLOAT16, kv_format

    if kv != "auto":
        known = kv_format(kv)  # raises for an unknown name
        possible = {kind.name: kind for kind in shape.kv_formats}
        if known.name not in possible:
            raise UsageError(f"--kv {known.name}: not possible for this model", f"use one of {', '.join(possible)}")
        return shape.with_kv(possible[known.name])
    if not targets:
        return shape.with_kv(FLOAT16)
    return shape.with_kv(fitting_kv(shape, targets[0], context, sequences))


def _parse_users(users: str, contexts: Sequence[int], *, explain: bool) -> list[int]:
    """Return the distinct numbers of users. Raises UsageError."""
    from headrace.app.bench.measure.plan import parse_counts

    counts = list(dict.fromkeys(parse_counts(users, "--users")))
    if min(counts) < 1:
        raise UsageError("--users must be at least 1")
    if len(contexts) > 1 or explain:
        raise UsageError("--users needs one --context, and excludes --explain")
    return counts


@click.command()
@click.option("--chip", metavar="CHIP", shell_complete=chip_names, help="Chip to fit [this machine].")
@_memory_option
@click.option(
    "--context",
    type=click.IntRange(0),
    default=DEFAULT_CONTEXT,
    metavar="N",
    help=f"Tokens in the cache [{DEFAULT_CONTEXT}].",
)
@json_option
def fit(chip: str | None, memory: int | None, context: int, as_json: bool) -> None:
    """List the catalog models that fit this machine, with the predicted speed of each."""
    from headrace.app.predict.document import catalog_fit
    from headrace.app.predict.targets import targets_for

    target, *_ = targets_for((chip,) if chip else (), memory, others=False)  # of several variants the first
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
