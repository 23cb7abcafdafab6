"""Layers that attend through a sliding window: a flag for each layer, or every n-th layer without one."""

from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import UnsupportedModelError

_KEY = "{arch}.attention.sliding_window_pattern"


def window_flags(metadata: Metadata, layers: int, period: int) -> list[bool]:
    """Return whether each layer has a window. period: every n-th layer has none, unless the file states it."""
    if metadata.is_list(_KEY):
        return metadata.flags(_KEY, layers)
    period = metadata.integer(_KEY, period, maximum=1 << 16)
    return [period == 0 or (layer + 1) % period != 0 for layer in range(layers)]


def window_period(metadata: Metadata, layers: int, period: int) -> int:
    """Return n if every n-th layer has no window. Raises UnsupportedModelError for another order of layers."""
    flags = window_flags(metadata, layers, period)
    if all(flags):
        return layers + 1
    stated = flags.index(False) + 1
    if flags != [(layer + 1) % stated != 0 for layer in range(layers)]:
        raise UnsupportedModelError(f"a GGUF {metadata.architecture!r} with windows in these layers is not supported")
    return stated
