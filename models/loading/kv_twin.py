"""The same weights with K/V stored in another way, to hold one against the other."""

from headrace.models.network.decoder import Decoder
from headrace.models.network.stored_kv import stored_kv
from headrace.runtime.network import Network
from headrace.runtime.ops.kv_format import KVFormat


def with_kv(network: Network, wanted: KVFormat) -> Network:
    """Return a network that shares every weight with `network`. Raises UsageError where its K/V cannot be `wanted`."""
    if isinstance(network, Decoder):
        return network.with_kv(stored_kv(network.config, network.ops, network.dtype, wanted))
    from headrace.models.mlx_lm.network import MlxLmNetwork  # half a second of imports

    assert isinstance(network, MlxLmNetwork)
    return network.with_kv(wanted)
