"""`headrace predict`: how fast a model would decode, and whether it fits, from its shape alone.

`headrace fit`: the same question turned round, for every model of the catalog on one machine.
"""

from typing import TYPE_CHECKING

import click

from headrace.app.cli.json_output import print_json

if TYPE_CHECKING:
    from headrace.app.predict.prediction import Target

DEFAULT_CONTEXT = 4096


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
@click.option("--explain", is_flag=True, help="List every matrix and cache read of a step, and of a prefill.")
@click.option("--prefill", "prefill", type=click.IntRange(1), default=512, show_default=True, help="For --explain.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def predict(
    model: str | None,
    chips: tuple[str, ...],
    list_chips: bool,
    memory: int | None,
    contexts: str,
    explain: bool,
    prefill: int,
    as_json: bool,
) -> None:
    """Say how fast MODEL would decode on this machine or other chips, what limits it, and what would help."""
    if list_chips:
        _list_chips(as_json)
        return
    from headrace.app.bench.measure.plan import parse_counts
    from headrace.app.predict.document import explanation, prediction
    from headrace.models.find_shape import find_shape

    counts = parse_counts(contexts, "--context")
    name, shape = find_shape(model)
    asked = [min(context, shape.context_length - 1) for context in counts]
    if explain:
        document = explanation(name, shape, past=asked[-1], prefill=prefill)
    else:
        document = prediction(name, shape, targets_for(chips, memory), list(dict.fromkeys(asked)))
    if as_json:
        print_json(document)
        return
    from headrace.app.predict.view import show_explanation, show_prediction

    (show_explanation if explain else show_prediction)(document)


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


def targets_for(chips: tuple[str, ...], memory: int | None, *, others: bool = True) -> list["Target"]:
    """The chips asked for; without any, this machine, and with `others` the Apple chips of the table."""
    from headrace.app.predict.chip_names import chip_targets, known_targets

    if chips:
        return list(dict.fromkeys(target for chip in chips for target in chip_targets(chip, memory)))
    here = _this_machine()
    return [*([here] if here else []), *(known_targets() if others or here is None else [])]


def _this_machine() -> "Target | None":
    """This machine at its measured peak (measured now if it never was), with its own step-cost fit if there is one."""
    from headrace.app.predict.fit_store import remembered
    from headrace.app.predict.prediction import Target
    from headrace.runtime.machine.bandwidth import measure_peak
    from headrace.runtime.machine.hardware import machine
    from headrace.runtime.machine.memory import budget
    from headrace.runtime.machine.peaks import cached_peak

    host = machine()
    room = budget(host)
    peak = cached_peak(host) or measure_peak(host=host)
    apple = host.backend == "metal" and host.nominal_bandwidth is not None
    return Target(
        name="this machine",
        bandwidth=host.nominal_bandwidth if apple and host.nominal_bandwidth else peak.bytes_per_second,
        memory=room.usable if room else None,
        apple=apple,
        fit=remembered(host),
        measured=not apple,
    )
