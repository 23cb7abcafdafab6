"""`--kv`: the K/V format by its name in `runtime.ops.kv_format`, or `auto`, the best that fits in memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.loading.load import KVChoice

PACKED = frozenset({"q8", "k8v4", "q4"})
KV_NAMES = ("f16", "q8", "k8v4", "q4", "auto")  # spelt out, since their module imports mlx


def kv_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --kv to a click command."""
    import click

    help = f"K/V format: {', '.join(KV_NAMES[:-1])}, or auto, the best that fits [f16, or the settings']."
    return click.option("--kv", type=click.Choice(KV_NAMES), metavar="FORMAT", help=help)(command)


def kv_choice(name: str) -> "KVChoice":
    """Return a name's format for loading, or "auto". Raises UsageError for an unknown name."""
    from headrace.runtime.ops.kv_format import kv_format

    return "auto" if name == "auto" else kv_format(name)
