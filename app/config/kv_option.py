"""`--kv`: how K/V are stored. A name of `runtime.ops.kv_format`, or `auto`, which leaves it to the memory there is."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.runtime.ops.kv_format import FORMATS, kv_format

if TYPE_CHECKING:
    from headrace.models.loading.load import KVChoice

PACKED = frozenset(known.name for known in FORMATS if known.packed)
KV_NAMES = (*(known.name for known in FORMATS), "auto")


def kv_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option, for a command that takes `kv`."""
    import click

    names = ", ".join(KV_NAMES[:-1])
    return click.option(
        "--kv",
        type=click.Choice(KV_NAMES),
        metavar="FORMAT",
        help=f"How K/V are stored: {names}, or auto, the best that fits [f16, or the settings'].",
    )(command)


def kv_choice(name: str) -> "KVChoice":
    """What loading takes. Raises UsageError for a name that is none of KV_NAMES."""
    return "auto" if name == "auto" else kv_format(name)
