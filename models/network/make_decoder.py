"""Choice of the decoder's class for a model's configuration.

`models.loading` calls `make_decoder`; ranks make theirs in `loading.rank_part`. A new variant is a branch here, and
overrides steps of `Decoder`.

Guard: tests/parity/test_mlx_lm_families.py, which has families of each variant.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.altup_decoder import AltUpDecoder
from headrace.models.network.block_residual_decoder import BlockResidualDecoder
from headrace.models.network.decoder import Decoder
from headrace.models.network.long_rope_decoder import LongRopeDecoder, long_rope
from headrace.models.network.parameters import Parameters
from headrace.models.network.rwkv_decoder import RwkvDecoder
from headrace.runtime.ops import Ops
from headrace.runtime.ops.kv_format import KVFormat


def make_decoder(
    config: DecoderConfig, parameters: Parameters, ops: Ops, dtype: mx.Dtype, kv: KVFormat | None = None
) -> Decoder:
    """Return the decoder of `config`, with K/V in `kv` (`models.network.stored_kv`; None: the default of `ops`).

    Raises CheckpointError for tensors that do not fit.
    """
    if config.altup is not None:
        return AltUpDecoder(config, parameters, ops, dtype, kv)
    if config.block_layers:
        return BlockResidualDecoder(config, parameters, ops, dtype, kv)
    if any(layer.mixer is not None and layer.mixer.time_mix is not None for layer in config.layers):
        return RwkvDecoder(config, parameters, ops, dtype, kv)
    rope = long_rope(config)
    if rope is not None:
        return LongRopeDecoder(config, parameters, ops, dtype, rope)
    return Decoder(config, parameters, ops, dtype, kv)
