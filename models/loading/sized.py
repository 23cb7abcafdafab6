"""A network before its weights are read: by its sizes, the context that fits into memory is found.

`load.sized_network` makes one on a single machine, `rank_part.Rank.sized` one of a rank among several.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from headrace.runtime.metrics.cost import LayerKV
from headrace.runtime.network import Network


class Sized(Struct, frozen=True):
    """A network without weights.

    make: reads the weights, and returns the network.
    weights: bytes of all weights.
    kv: K/V of its layers.
    """

    make: Callable[[], Network]
    weights: int
    kv: Sequence[LayerKV]
