"""Decoder whose layers read mixtures of earlier residual sums (attention residuals, Kimi K3).

The outputs of a block of layers are added up to a sum of its own; the embedding is the first block's. Both halves of a
layer read a mixture of the sums of all earlier blocks and the current one, weighted by a softmax:

    input = sum over blocks of softmax(norm(sum) . projection) * sum
    sum   = sum + half(norm(input))                        without the first term, where a block begins

The last norm has such a mixture as its input, too.

Dimensions: B sequences, T new tokens, K sums, E hidden size.

Guards: tests/parity/test_mlx_lm_families.py, variant `kimi-k3`.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.decoder import Decoder
from headrace.models.network.layers import read_residual_mix
from headrace.models.network.parameters import Parameters
from headrace.models.network.projections import Residual, experts_output
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import ResidualMix


class BlockResidualDecoder(Decoder):
    """See the module. Layers run one operation at a time."""

    _last_mix: ResidualMix

    def _read_ends(self, config: DecoderConfig, parameters: Parameters) -> None:
        super()._read_ends(config, parameters)
        self._last_mix = read_residual_mix(parameters, "model.output_attn_res", config.hidden_size)

    @property
    def _arrays(self) -> list[mx.array]:
        return [*super()._arrays, *self._last_mix]

    def _run_layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """Run the layers on x (B, T, E) -> (B, T, E), or no rows if none is wanted."""
        sums = [x]  # of all blocks, the current one last
        for index in range(len(self._layers)):
            if self._is_left_out(index, kv):
                return x[:, :0]
            sums = self._add_layer(sums, kv, index)
        return self._mixed(sums, self._last_mix)

    def _add_layer(self, sums: list[mx.array], kv: KVPass, index: int) -> list[mx.array]:
        """Return the sums (B, T, E) after one layer, which may begin a block."""
        ops = self._ops
        eps = self.config.norm_eps
        layer = self._layers[index]
        assert layer.mixes is not None
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        before_attention, before_mlp = layer.mixes

        mixed = self._mixed(sums, before_attention)
        normed = ops.rms_norm(mixed, layer.input_norm, eps)
        [attended] = self._attention(Residual(mixed, normed), kv, index)
        if index % self.config.block_layers == 0:
            earlier = sums
            current = ops.linear(attended.x, attended.weight)
        else:
            *earlier, current = sums
            current = ops.linear_add(attended.x, attended.weight, current)

        mixed = self._mixed([*earlier, current], before_mlp)
        residual = Residual(mixed, ops.rms_norm(mixed, layer.mlp_norm, eps))
        if layer.mixture is not None:
            current = current + experts_output(ops, residual, layer, self.config)
        if layer.down is not None:  # the dense feed-forward, or the expert that all tokens use
            fed = self._feed_forward(residual, layer)
            current = ops.linear_add(fed.x, fed.weight, current)
        return [*earlier, current]

    def _mixed(self, sums: list[mx.array], mix: ResidualMix) -> mx.array:
        """Return the mixture (B, T, E) of sums; of one, that itself."""
        if len(sums) == 1:
            return sums[0]
        stack = mx.stack(sums).astype(mx.float32)  # (K, B, T, E); half precision would turn close logits
        query = mix.norm.astype(mx.float32) * mix.projection  # (E,)
        logits = mx.fast.rms_norm(stack, None, self.config.norm_eps) @ query  # (K, B, T)
        weights = mx.softmax(logits, axis=0)[..., None]
        return (weights * stack).sum(axis=0).astype(sums[0].dtype)
