"""Multi-token prediction heads of headrace's decoder: one layer of it after a joined input (`models.network.mtp`).

In tensor parallel the layer is divided as any other. A draft token has five collectives then: the token, its embedding
beside the hidden state, the layer's two sums, and the logits. Elsewhere the head needs no other rank.
Dimensions: T tokens, E hidden size.

Guard: tests/models/network/test_mtp.py.
"""

from collections.abc import Callable
from typing import Any, Self

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.safetensors import Checkpoint, quantization_section
from headrace.models.checkpoint.text_part import TextCheckpoint, headrace_name, text_config
from headrace.models.network.decoder import Decoder
from headrace.models.network.mtp import HeadTensors
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensor_decoder import TensorDecoder
from headrace.models.network.tensors import head_norms, head_projection
from headrace.models.network.weight_arrays import weight_arrays
from headrace.runtime.errors import UnsupportedModelError
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import Ops


class HeadDecoder(Decoder):
    """A `runtime.network.DraftHead`. It embeds and projects with the network it belongs to, see `of`."""

    _network: Decoder
    _hidden_first: bool

    def of(self, network: Decoder, *, hidden_first: bool) -> Self:
        """Set the network; return self. hidden_first: the projection's input begins with the hidden state.

        Raises UnsupportedModelError for a network with LayerNorms: with a head, `layers` ends in an RMSNorm.
        """
        if network.config.family.norm != "rms":
            raise UnsupportedModelError("multi-token prediction heads need RMSNorms, and this model has LayerNorms")
        self._network = network
        self._hidden_first = hidden_first
        return self

    def hidden(self, tokens: mx.array, hidden: mx.array, kv: KVPass) -> mx.array:
        """See `DraftHead`: tokens, hidden (1, T), (1, T, E) -> (1, T, E)."""
        eps = self.config.norm_eps
        before = hidden.astype(self._dtype)
        embedded, before = self._inputs_of(tokens, before)
        parts = [
            self._ops.rms_norm(embedded, self._embedding_norm, eps),
            self._ops.rms_norm(before, self._hidden_norm, eps),
        ]
        if self._hidden_first:
            parts.reverse()
        x = self._ops.linear(mx.concatenate(parts, axis=-1), self._head)  # (1, T, 2E) -> (1, T, E)
        return self._ops.rms_norm(self.layers(x, kv), self._norm, eps)

    def logits(self, x: mx.array) -> mx.array:
        """See `DraftHead`: (1, T, E) -> (1, V)."""
        return self._network.logits(x)

    def _inputs_of(self, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        return self._network.embed(tokens), hidden

    def _read_ends(self, config: DecoderConfig, parameters: Parameters) -> None:
        projection = head_projection(config)
        self._table = parameters.matrix(projection.name, projection.rows, projection.columns)
        self._head = self._table  # as if tied
        self._norm, self._embedding_norm, self._hidden_norm = (
            parameters.vector(norm.name, norm.size, config.norm_weight_offset) for norm in head_norms(config)
        )
        self._inputs = None
        self.vocab_size = config.vocab_size

    @property
    def _arrays(self) -> list[mx.array]:
        return [*super()._arrays, self._embedding_norm, self._hidden_norm]


class TensorHead(HeadDecoder, TensorDecoder):
    """A rank's part of a head. Tokens and hidden states are rank 0's, and zeros on the others."""

    def follow_head(self, tokens: int, kv: KVPass) -> mx.array:
        """Run rank 0's pass over so many tokens; return the hidden states (1, T, E)."""
        hidden = mx.zeros((1, tokens, self.config.hidden_size), self._dtype)
        return self.hidden(mx.zeros((1, tokens), mx.uint32), hidden, kv)

    def _inputs_of(self, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        assert isinstance(self._network, TensorDecoder)
        rows = self._network.own_rows(self._group.all_sum(tokens))
        sums = self._group.all_sum(mx.concatenate([rows, hidden], axis=-1))  # (1, T, 2E)
        embedded, hidden = mx.split(sums, 2, axis=-1)
        return embedded, hidden


def head_config(tensors: HeadTensors) -> DecoderConfig:
    """Return the decoder configuration of a head's layer."""
    config = decoder_config(text_config(tensors.checkpoint.config))
    assert config is not None
    return config


def head_parameters(
    tensors: HeadTensors,
    ops: Ops,
    dtype: mx.Dtype,
    take: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    read: Callable[[Checkpoint], dict[str, Any]] = weight_arrays,
) -> Parameters:
    """Return a head's weights under the names of a model of one layer. See `Parameters`."""
    checkpoint = tensors.checkpoint
    config = text_config(checkpoint.config)
    stored = {headrace_name(ours, config): theirs for theirs, ours in tensors.renamed.items()}
    infos = {ours: checkpoint.tensors[theirs] for ours, theirs in stored.items()}
    section = quantization_section(checkpoint.config)
    if section is not None:
        modules = {theirs.rpartition(".")[0]: ours.rpartition(".")[0] for ours, theirs in stored.items()}
        renamed = {modules.get(name, name): entry for name, entry in section.items()}
        config = {**config, "quantization": renamed}
    part = TextCheckpoint(config, infos, stored, {}, whole_norms=not tensors.shifts)
    return Parameters(replace(checkpoint, tensors=dict(tensors.infos)), ops, dtype, take, read, part)


def add_own_head(network: Decoder, tensors: HeadTensors) -> Decoder:
    """Give our decoder its checkpoint's head, if its caches drop rejected draft tokens, and return it."""
    if not network.rolls_back:
        return network
    parameters = head_parameters(tensors, network.ops, network.dtype)
    head = HeadDecoder(head_config(tensors), parameters)
    network.draft_head = head.of(network, hidden_first=tensors.hidden_first)
    return network
