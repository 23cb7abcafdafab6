"""The network of a multi-token prediction head, and its place in the network that it belongs to."""

from typing import cast

import mlx.core as mx
import mlx.nn as nn

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.network.decoder import Decoder
from headrace.models.network.mlx_lm import MlxLmNetwork
from headrace.models.network.mlx_lm_backend import MlxLmPass
from headrace.models.network.mtp import Head, HeadInput, HeadTensors, project, text_model
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import Ops


class MtpNetwork(MlxLmNetwork):
    """A `runtime.network.DraftHead`: the model of one layer, with the head's input in place of its table."""

    def hidden(self, tokens: mx.array, hidden: mx.array, kv: KVPass) -> mx.array:
        """tokens, hidden (1, T), (1, T, E) -> (1, T, E)."""
        body = text_model(self._model).model
        if self._functions is not None:
            self._functions.phase = kv.rows[0].phase
        cast(HeadInput, body.embed_tokens).use(hidden)
        out: mx.array = body(tokens, cache=cast(MlxLmPass, kv).parts)
        return out

    def logits(self, x: mx.array) -> mx.array:
        """(1, T, E) -> (1, V)."""
        return project(self._model, x[:, -1:])[:, 0]


class _DecoderTable(nn.Module):  # type: ignore[misc]
    """Table and output projection of our decoder, as those of an mlx-lm model."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        object.__setattr__(self, "_decoder", decoder)  # no parameters of the head

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens (B, T) -> (B, T, E)."""
        x: mx.array = self._decoder.embed(tokens)
        return x

    def as_linear(self, x: mx.array) -> mx.array:
        """x (B, T, E) -> (B, T, V)."""
        logits: mx.array = self._decoder.project(x)
        return logits


class _DecoderModel(nn.Module):  # type: ignore[misc]
    """Our decoder in the parts of an mlx-lm model that a head uses."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = _DecoderTable(decoder)
        self.lm_head = decoder.project


def add_head(
    network: MlxLmNetwork | Decoder,
    tensors: HeadTensors,
    device: mx.DeviceType,
    kernels: Ops | None,
    requantize: Quantization | None,
) -> MlxLmNetwork | Decoder:
    """Give a network its checkpoint's head, and return it. The head's arrays become some of the network's.

    Draft tokens need a network that can drop the rejected ones; others get no head.
    """
    if not network.rolls_back:
        return network
    bound = Head(tensors, _DecoderModel(network) if isinstance(network, Decoder) else network.model)
    head = MtpNetwork(tensors.checkpoint, device=device, requantize=requantize, kernels=kernels, head=bound)
    head.use_kernels()
    if isinstance(network, MlxLmNetwork):
        network.arrays = [*network.arrays, *head.arrays]
    network.draft_head = head
    return network
