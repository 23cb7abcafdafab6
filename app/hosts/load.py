"""Loading of a model for commands that answer: on this machine, or on several that share it.

A new option of loading (`ModelSpec`) takes effect in `load_options`, as one of `LoadOptions`. `app.api` makes its own
from its arguments; a test compares both.

Guard: tests/app/hosts/test_start.py.
"""

from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from headrace.app.config.load_options import (
    HostsChoice,
    ModelSpec,
    activations_choice,
    adapter_on_hosts,
    kv_choice,
)
from headrace.models.loading.load import LoadedModel, LoadOptions, load_resolved
from headrace.models.registry.progress import Progress
from headrace.models.registry.resolve import ResolvedModel

if TYPE_CHECKING:
    from headrace.app.hosts.start import Ranks, Say


def load_model(resolved: ResolvedModel, spec: ModelSpec, progress: Progress) -> LoadedModel:
    """Load a model without its draft. Raises the errors of `load_resolved` or `load_on_hosts`.

    resolved: its files.
    spec: the way to load it.
    """
    options = load_options(spec, progress)
    if spec.hosts is None:
        return load_resolved(resolved, **options)
    loaded, _ = load_on_hosts(spec.hosts, resolved, **options)
    return loaded


def load_options(spec: ModelSpec, progress: Progress) -> LoadOptions:
    """Return the options of loading of a spec. Raises UsageError for an unknown K/V format or number of bits."""
    return {
        "context": spec.context,
        "kv": kv_choice(spec.kv),
        "activations": activations_choice(spec.activations),
        "force": spec.force,
        "progress": progress,
    }


def load_on_hosts(
    choice: HostsChoice, resolved: ResolvedModel, *, say: "Say | None" = None, **options: Unpack[LoadOptions]
) -> "tuple[LoadedModel, Ranks]":
    """Start the ranks and load each one's part of a model. A lost rank ends this process, after `say`.

    Raises UsageError for hosts, options and adapters that do not go together, EngineError that names a rank that cannot
    take part, and the errors of `load_ranked`.
    """
    from headrace.app.hosts.start import say_lost, start_ranks
    from headrace.models.loading.ranked import load_ranked

    if resolved.adapter is not None:
        raise adapter_on_hosts(resolved.name)
    ranks = start_ranks(choice, resolved, say or say_lost)
    assert ranks.split is not None
    try:
        loaded = load_ranked(resolved, ranks.leader, ranks.split, backend=ranks.backend, **options)
    except BaseException:  # Ctrl-C, too: processes on other machines end
        ranks.close()
        raise
    note = f"{ranks.split.kind} parallel on {', '.join(ranks.hosts.names)}"
    return replace(loaded, notes=[*loaded.notes, note], ranks=tuple(ranks.lines())), ranks
