"""The network of a multi-token prediction head, and its place in the network that it belongs to.

`loading.load` and `loading.rank_part` add it to a network of mlx-lm's classes; `network.head_decoder` does the same for
headrace's own decoder.
"""

import mlx.core as mx

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.mlx_lm.cache import MlxLmCache
from headrace.models.mlx_lm.mtp import Head, project, text_model
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.network.mtp import HeadTensors
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import Ops


class MtpNetwork(MlxLmNetwork):
    """A `runtime.network.DraftHead`: the model of one layer, with the head's input in place of its table."""

    def hidden(self, tokens: mx.array, hidden: mx.array, kv: KVPass) -> mx.array:
        """tokens, hidden (1, T), (1, T, E) -> (1, T, E)."""
        [row] = kv.rows
        assert isinstance(row.cache, MlxLmCache)
        body = text_model(self._model).model
        if self._functions is not None:
            self._functions.phase = row.phase
        body.embed_tokens.use(hidden)
        out: mx.array = body(tokens, cache=row.cache.parts)
        return out

    def logits(self, x: mx.array) -> mx.array:
        """(1, T, E) -> (1, V)."""
        return project(self._model, x[:, -1:])[:, 0]


def add_head(
    network: MlxLmNetwork,
    tensors: HeadTensors,
    device: mx.DeviceType,
    kernels: Ops | None,
    requantize: Quantization | None,
) -> MlxLmNetwork:
    """Give mlx-lm's network its checkpoint's head, and return it. The head's arrays become some of the network's.

    Draft tokens need a network that can drop the rejected ones; others get no head.
    """
    if not network.rolls_back:
        return network
    bound = Head(tensors, network.model)
    head = MtpNetwork(tensors.checkpoint, device=device, requantize=requantize, kernels=kernels, head=bound)
    head.use_kernels()
    network.arrays = [*network.arrays, *head.arrays]
    network.draft_head = head
    return network
