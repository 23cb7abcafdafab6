"""The same weights with K/V stored in another way, to hold one against the other."""

from typing import Any

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.models.network.stored_kv import stored_kv
from headrace.runtime import ops
from headrace.runtime.kv_format import KVFormat
from headrace.runtime.network import Network


def with_kv(network: Network[Any], wanted: KVFormat) -> Network[Any]:
    """A network that shares every weight with `network`. Raises UsageError where its K/V cannot be `wanted`."""
    if isinstance(network, Decoder):
        return network.with_kv(stored_kv(network.config, network.ops, network.dtype, wanted))
    stored_kv(None, ops.select(), mx.float32, wanted)
    return network
