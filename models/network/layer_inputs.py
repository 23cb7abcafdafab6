"""Inputs of single layers (Gemma 3n and 4): rows of a table by token, added to a projection of the token's embedding.

    input = (table[token] * sqrt(P) + rms_norm(projection(x) / sqrt(E))) / sqrt(2)

P = size of a layer's input, L = layers, E = size of hidden states. The projection is multiplied by none of the constant
factors: they are part of the norm's weight and epsilon. Rows of the table are multiplied by one number.

`Decoder.embed` computes the inputs of all layers at once, and `Decoder` adds each layer's own with the weights that
`read_input` returns. The matrices are rows of `tensors.py`. tests/parity/test_transformers.py compares logits.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import layer_input
from headrace.runtime.ops import LayerInput, Ops


class LayerInputs:
    """Weights of all layers' inputs."""

    def __init__(self, config: DecoderConfig, parameters: Parameters) -> None:
        self._size = config.input_size
        width = config.hidden_size
        all_sizes = len(config.layers) * self._size
        self.table = parameters.matrix("model.embed_tokens_per_layer", config.input_vocab, all_sizes)
        self.projection = parameters.matrix("model.per_layer_model_projection", all_sizes, width)
        self._lacks_rows = config.input_vocab < config.vocab_size
        self._row_scale = (self._size / 2) ** 0.5  # sqrt(P) / sqrt(2)
        self._norm = parameters.vector("model.per_layer_projection_norm.weight", self._size) * 0.5**0.5
        # y / sqrt(E) has the mean square of y divided by E: its norm is that of y with an epsilon E times as large.
        self._eps = config.norm_eps * width

    @property
    def arrays(self) -> list[mx.array]:
        """All but the table, of which a step reads single rows."""
        return [*self.projection.arrays, self._norm]

    def compute(self, ops: Ops, tokens: mx.array, x: mx.array) -> mx.array:
        """Return the inputs of all layers, one after the other: tokens (B, T), x (B, T, E) -> (B, T, L * P)."""
        if self._lacks_rows:  # of Gemma 3n's tokens for images and sound
            tokens = mx.where(tokens < self.table.rows, tokens, 0)
        rows = ops.embed(tokens, self.table, x.dtype) * self._row_scale  # (B, T, L * P)
        projected = ops.linear(x, self.projection).reshape(*tokens.shape, -1, self._size)  # (B, T, L, P)
        normed = ops.rms_norm(projected, self._norm, self._eps)
        inputs: mx.array = rows + normed.reshape(rows.shape)
        return inputs


def read_input(config: DecoderConfig, parameters: Parameters, prefix: str) -> LayerInput:
    """Return a layer's weights for its own input. prefix: of the layer's tensors."""
    gate, projection = layer_input(config)
    return LayerInput(
        gate=parameters.tensor(prefix, gate),
        projection=parameters.tensor(prefix, projection),
        norm=parameters.vector(f"{prefix}.post_per_layer_input_norm.weight", config.hidden_size),
    )
