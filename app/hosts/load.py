"""Loading of a model for every command that answers: on this machine, or on several that share it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from headrace.app.config.load_options import HostsChoice
from headrace.models.loading.load import LoadedModel, LoadOptions, load_resolved
from headrace.models.registry.resolve import ResolvedModel

if TYPE_CHECKING:
    from headrace.app.hosts.start import Ranks, Say


def load_model(resolved: ResolvedModel, hosts: HostsChoice | None, **options: Unpack[LoadOptions]) -> LoadedModel:
    """Load a model on `hosts`; None: on this machine alone. Raises the errors of `load_resolved` or `load_on_hosts`."""
    if hosts is None:
        return load_resolved(resolved, **options)
    loaded, _ = load_on_hosts(hosts, resolved, **options)
    return loaded


def load_on_hosts(
    choice: HostsChoice, resolved: ResolvedModel, *, say: "Say | None" = None, **options: Unpack[LoadOptions]
) -> "tuple[LoadedModel, Ranks]":
    """Start the ranks and load each one's part of a model. A lost rank ends this process, after `say`.

    Raises UsageError for hosts and options that do not go together, EngineError that names a rank that cannot take
    part, and the errors of `load_ranked`.
    """
    from headrace.app.hosts.start import say_lost, start_ranks
    from headrace.models.loading.ranked import load_ranked

    ranks = start_ranks(choice, resolved, say or say_lost)
    assert ranks.split is not None
    try:
        loaded = load_ranked(resolved, ranks.leader, ranks.split, backend=ranks.backend, **options)
    except BaseException:
        ranks.close()
        raise
    note = f"{ranks.split.kind} parallel on {', '.join(ranks.hosts.names)}"
    return replace(loaded, notes=[*loaded.notes, note], ranks=tuple(ranks.lines())), ranks
