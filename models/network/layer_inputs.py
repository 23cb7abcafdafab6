"""Inputs of single layers (Gemma 4): rows of a table by token, added to a projection of the token's embedding.

P = size of a layer's input, L = layers.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import layer_input
from headrace.runtime.ops import LayerInput, Ops


class LayerInputs:
    """Weights of all layers' inputs. arrays: those that every step reads, all but the table."""

    def __init__(self, config: DecoderConfig, parameters: Parameters) -> None:
        self._size = config.input_size
        width = config.hidden_size
        wide = len(config.layers) * self._size
        self.table = parameters.matrix("model.embed_tokens_per_layer", config.input_vocab, wide)
        self.projection = parameters.matrix("model.per_layer_model_projection", wide, width)
        # The projection is scaled before its norm, which only its epsilon shows; both parts are halved in variance.
        self._norm = parameters.vector("model.per_layer_projection_norm.weight", self._size) * 0.5**0.5
        self._eps = config.norm_eps * width

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.projection.arrays, self._norm]

    def of(self, ops: Ops, tokens: mx.array, x: mx.array) -> mx.array:
        """Return the inputs of all layers, one after the other: tokens (B, T), x (B, T, E) -> (B, T, L * P)."""
        rows = ops.embed(tokens, self.table, x.dtype) * (self._size / 2) ** 0.5
        projected = ops.linear(x, self.projection).reshape(*tokens.shape, -1, self._size)
        both: mx.array = rows + ops.rms_norm(projected, self._norm, self._eps).reshape(rows.shape)
        return both


def read_input(config: DecoderConfig, parameters: Parameters, prefix: str) -> LayerInput:
    """Return a layer's weights for its own input."""
    gate, projection = layer_input(config)
    return LayerInput(
        gate=parameters.tensor(prefix, gate),
        projection=parameters.tensor(prefix, projection),
        norm=parameters.vector(f"{prefix}.post_per_layer_input_norm.weight", config.hidden_size),
    )
