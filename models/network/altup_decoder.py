"""Decoder with alternating updates of S residual streams, the first of which a layer computes (Gemma 3n).

AltUp is arXiv:2301.13310. A layer predicts all streams, computes the first, and corrects all by its change:

    predicted = streams + A(r) @ streams                          r = tanh(router(norm(first stream)) / E)
    output    = layer(predicted first stream)                     with Laurel, a low-rank product next to attention
    streams   = predicted + (1 + C(r)) * (output - predicted first stream)                  r of the output

A and C are linear functions of the router's S numbers. A layer's own input is added to all streams but the first.

Dimensions: B sequences, T new tokens, S streams, E hidden size, L layers, P size of a layer's own input.

Guard: tests/parity/test_transformers.py.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.projections import Epilogue, Residual
from headrace.models.network.tensors import stream_projections
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import AltUpWeights, Weight

_SMALLEST = 1e-5  # mean square of a stream that is scaled, as in transformers


class AltUpDecoder(Decoder):
    """See the module. Layers run one operation at a time."""

    _into: list[Weight]  # (E, E): projections of the embedding to the streams after the first
    _out: list[Weight]  # (E, E): of those streams, before all are averaged

    def _read_ends(self, config: DecoderConfig, parameters: Parameters) -> None:
        super()._read_ends(config, parameters)
        assert config.altup is not None
        self._into, self._out = (
            [parameters.matrix(tensor.name, tensor.rows, tensor.columns) for tensor in tensors]
            for tensors in stream_projections(config, config.altup)
        )
        self._half = mx.array([0.5**0.5], self._dtype)  # gives a sum of two the mean square of one

    @property
    def _arrays(self) -> list[mx.array]:
        arrays = super()._arrays
        for weight in (*self._into, *self._out):
            arrays += weight.arrays
        return arrays

    def _run_layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """Run the layers on x (B, T, E + L * P) -> (B, T, E), or no rows if none is wanted."""
        width = self.config.hidden_size
        first = x[..., :width]
        # (B, T, S, E)
        streams = _as_large(mx.stack([first, *(self._ops.linear(first, weight) for weight in self._into)], axis=-2))
        for index in range(len(self._layers)):
            if self._is_left_out(index, kv):
                return first[:, :0]
            streams = self._update(streams, kv, index, self._own_input(x, index))
        first, *others = (part.squeeze(-2) for part in mx.split(streams, streams.shape[-2], axis=-2))
        projected = [self._ops.linear(other, weight) for other, weight in zip(others, self._out, strict=True)]
        return _as_large(mx.stack([first, *projected], axis=-2)).mean(axis=-2)

    def _update(self, streams: mx.array, kv: KVPass, index: int, own_input: mx.array) -> mx.array:
        """Run one layer on the streams (B, T, S, E). own_input: its own (B, T, P)."""
        ops = self._ops
        eps = self.config.norm_eps
        layer = self._layers[index]
        altup = layer.altup
        assert altup is not None
        assert layer.input_norm is not None
        assert layer.own_input is not None

        numbers = self._routed(streams[..., 0, :], altup)  # (B, T, S)
        coefficients = (numbers[..., None, None, :] * altup.prediction).sum(axis=-1)  # (B, T, S, S)
        predicted = streams + (coefficients @ streams.astype(mx.float32)).astype(streams.dtype)
        first = predicted[..., 0, :]  # (B, T, E)

        # (x + laurel(norm(x)) + norm(attention(norm(x)))) / sqrt(2)
        normed = ops.rms_norm(first, layer.input_norm, eps)
        low_rank = ops.linear(ops.linear(normed, altup.left), altup.right)
        laurel = normed + ops.rms_norm(low_rank, altup.laurel_norm, eps)
        attended = self._attention(Residual(first, normed), kv, index)
        before_mlp = Epilogue(layer.mlp_norm, self._half)
        residual = self._add(first + laurel, attended, layer.attention_post_norm, before_mlp)

        # x + norm(mlp(norm(x)))
        fed = self._feed_forward(residual, layer)
        output = self._add(residual.x, [fed], layer.mlp_post_norm, Epilogue()).x

        numbers = self._routed(output, altup)
        factors = 1 + (numbers[..., None, :] * altup.correction).sum(axis=-1)  # (B, T, S)
        corrections = (output - first)[..., None, :].astype(mx.float32) * factors[..., None]
        streams = predicted + corrections.astype(predicted.dtype)

        gate = ops.linear(streams[..., 0, :] * altup.scale, layer.own_input.gate)
        own_output = ops.linear(ops.glu(gate, own_input, "gelu"), layer.own_input.projection)
        added = ops.rms_norm(own_output, layer.own_input.norm, eps)[..., None, :]
        return mx.concatenate([streams[..., :1, :], streams[..., 1:, :] + added], axis=-2)

    def _routed(self, x: mx.array, altup: AltUpWeights) -> mx.array:
        """Return the router's numbers of x (B, T, E), in float32: (B, T, S)."""
        routed = self._ops.linear(self._ops.rms_norm(x, altup.router_norm, self.config.norm_eps), altup.router)
        return mx.tanh(routed.astype(mx.float32) / self.config.hidden_size)


def _as_large(streams: mx.array) -> mx.array:
    """Scale streams (B, T, S, E) to the root mean square of the first."""
    squares = mx.square(streams.astype(mx.float32)).mean(axis=-1, keepdims=True)  # (B, T, S, 1)
    factors = mx.sqrt(squares[..., :1, :] / mx.maximum(squares, _SMALLEST))
    others = streams[..., 1:, :] * factors[..., 1:, :].astype(streams.dtype)
    return mx.concatenate([streams[..., :1, :], others], axis=-2)
