"""Decoder of RWKV-7, whose layers attend to nothing (arXiv:2503.14456).

Both halves of a layer read their normalized input x and that of the row before. With lerp(m) = x + m * (before - x):

    r, k, v = products of lerp(m_r), lerp(m_k), lerp(m_v)          receptance, key, value
    w, a, g = products of low rank of lerp(m_w), lerp(m_a), lerp(m_g)      decay, rate, gate
    v       = v + (v of the first layer - v) * sigmoid(another one of lerp(m_v))
    x       = x + output(the recurrence of r, w, k, v, a, with norms of heads and the gate g: `runtime.ops.recurrent`)
    x       = x + feed_forward(lerp(m_c))

A layer has three states: the two rows before, and that of the recurrence. Layers run one operation at a time.

Dimensions: B sequences, T new tokens, E hidden size.

Guard: tests/parity/test_mlx_lm_families.py.
"""

from collections.abc import Callable

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.models.network.projections import Residual
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import Weight

Activation = Callable[[mx.array], mx.array]


class RwkvDecoder(Decoder):
    """See the module."""

    def _run_layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """Run the layers on x (B, T, E) -> (B, T, E), or no rows if none is wanted."""
        ops = self._ops
        eps = self.config.norm_eps
        first_values: mx.array | None = None
        for index, layer in enumerate(self._layers):
            assert layer.output is not None
            assert layer.input_norm is not None
            assert layer.mlp_norm is not None
            normed = ops.layer_norm(x, layer.input_norm, layer.input_norm_bias, eps)
            mixed, first_values = self._mixed(normed, first_values, kv, index)
            x = ops.linear_add(mixed, layer.output, x)

            normed = ops.layer_norm(x, layer.mlp_norm, layer.mlp_norm_bias, eps)
            _, shift = layer.later_mixers
            fed = self._feed_forward(Residual(x, kv.mix(self._later_states[index] + 1, normed, shift)), layer)
            x = ops.linear_add(fed.x, fed.weight, x)
        if not any(row.output for row in kv.rows):
            return x[:, :0]
        return x

    def _mixed(self, x: mx.array, first_values: mx.array | None, kv: KVPass, index: int) -> tuple[mx.array, mx.array]:
        """Return the gated result of the recurrence (B, T, E), and the values of the first layer.

        x: the layer's normalized input (B, T, E).
        first_values: values of the first layer; None there.
        kv: the pass, with the states.
        index: of the layer.
        """
        ops = self._ops
        layer = self._layers[index]
        weights = layer.time_mix
        assert weights is not None
        assert layer.mixer is not None
        recurrence, _ = layer.later_mixers

        # Inputs between each row and the one before, and their products.
        for_r, for_w, for_k, for_v, for_a, for_g = mx.split(kv.mix(index, x, layer.mixer), 6, axis=-1)  # (1, N, E)
        v = ops.linear(for_v, weights.value)
        if first_values is None:
            first_values = v
        parts = [
            ops.linear(for_r, weights.receptance),
            self._low_rank(for_w, weights.decay, mx.tanh),
            ops.linear(for_k, weights.key),
            v,
            self._low_rank(for_a, weights.rate),
            self._low_rank(for_g, weights.gate, mx.sigmoid),
        ]
        if weights.value_mix is not None:
            parts += [first_values, self._low_rank(for_v, weights.value_mix)]
        row = mx.concatenate(parts, axis=-1)  # (B, T, 6 E), or 8 E
        return kv.mix(self._later_states[index], row, recurrence), first_values

    def _low_rank(self, x: mx.array, weights: tuple[Weight, Weight], activation: Activation | None = None) -> mx.array:
        """Return a product of low rank. activation: between its two products; None: none."""
        first, second = weights
        inner = self._ops.linear(x, first)
        if activation is not None:
            inner = activation(inner)
        return self._ops.linear(inner, second)
