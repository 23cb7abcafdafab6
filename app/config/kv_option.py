"""K/V format by its name in `runtime.ops.kv_format`, or `auto`, the best that fits in memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.models.loading.load import KVChoice

PACKED = frozenset({"q8", "k8v4", "q4"})
KV_NAMES = ("f16", "q8", "k8v4", "q4", "auto")  # spelt out, since their module imports mlx


def kv_choice(name: str) -> "KVChoice":
    """Return a name's format for loading, or "auto". Raises UsageError for an unknown name."""
    from headrace.runtime.ops.kv_format import kv_format

    return "auto" if name == "auto" else kv_format(name)
