"""Options of loading by their names: K/V format, bits of activations, hosts. Imports neither MLX nor models.

"auto" is the best K/V format that fits in memory, 8 bits if their measured divergence is small, and the split that is
predicted as fastest. Commands, settings and the engine's process share these names; `app.hosts.load` turns them into
objects when a model is loaded.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.app.answer import MAX_RUNNING

if TYPE_CHECKING:
    from headrace.models.loading.load import ActivationsChoice, KVChoice
    from headrace.runtime.errors import UsageError

PACKED = frozenset({"q8", "k8v4", "q4"})
"""K/V formats with less than 16 bits a value."""
# Spelt out, as PACKED is, since their module imports mlx; tests/app/model_info/test_kv_fits.py compares them.
KV_NAMES = ("f16", "q8", "k8v4", "q4", "auto")
ACTIVATION_NAMES = ("16", "8", "auto")
SPLIT_NAMES = ("tensor", "pipeline", "auto")


class HostsChoice(Struct, frozen=True):
    """Machines that share a model.

    hosts: a hostfile or names, as after --hosts.
    split: one of SPLIT_NAMES.
    """

    hosts: str
    split: str = "auto"


def adapter_on_hosts(name: str) -> "UsageError":
    """Return the error for a model with an adapter and --hosts."""
    from headrace.runtime.errors import UsageError

    return UsageError(
        f"--hosts: {name} has an adapter, which headrace applies on one machine",
        "merge the adapter into its base, and pass the result",
    )


class ModelSpec(Struct, frozen=True):
    """A model to load, and the way to load it. As a command to an engine process: load it.

    name: as after `-m`; None: the default.
    context: tokens; None: as many as fit into memory.
    kv: K/V format, as after --kv.
    force: load a model that does not fit into memory.
    draft: a draft model; None: none.
    serving: for many clients: prompts may fill the context, text leaves sooner, and the load is always reported.
    max_running: sequences at a time.
    activations: as after --activations.
    hosts: machines that share the model; None: this one alone.
    """

    name: str | None = None
    context: int | None = None
    kv: str = "f16"
    force: bool = False
    draft: str | None = None
    serving: bool = False
    max_running: int = MAX_RUNNING
    activations: str = "16"
    hosts: HostsChoice | None = None


def kv_choice(name: str) -> "KVChoice":
    """Return a name's format for loading, or "auto". Raises UsageError for an unknown name."""
    from headrace.runtime.ops.kv_format import kv_format

    return "auto" if name == "auto" else kv_format(name)


def activations_choice(name: str) -> "ActivationsChoice":
    """Return the bits for loading, or "auto". `name` is one of ACTIVATION_NAMES. Raises UsageError for others."""
    from headrace.runtime.errors import UsageError

    if name not in ACTIVATION_NAMES:
        raise UsageError(f"{name!r} is no width of activations", f"choose one of {', '.join(ACTIVATION_NAMES)}")
    return "auto" if name == "auto" else int(name)
