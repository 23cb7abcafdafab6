"""Choice of the decoder's class for a model's configuration, and of the storage format of its K/V.

`models.loading` calls `make_decoder`; ranks make theirs in `loading.rank_part`. A new variant is a branch here, and
overrides steps of `Decoder`.

Guards: tests/parity/test_mlx_lm_families.py, which has families of each variant; of refused formats
tests/parity/test_indexed.py and tests/app/bench/quality/test_quality_run.py.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.altup_decoder import AltUpDecoder
from headrace.models.network.block_residual_decoder import BlockResidualDecoder
from headrace.models.network.decoder import Decoder
from headrace.models.network.long_rope_decoder import LongRopeDecoder, long_rope
from headrace.models.network.parameters import Parameters
from headrace.models.network.rwkv_decoder import RwkvDecoder
from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import Ops
from headrace.runtime.ops.kv_format import KVFormat


def make_decoder(config: DecoderConfig, parameters: Parameters, kv: KVFormat | None = None) -> Decoder:
    """Return the decoder of `config`, with K/V in `kv` (see `stored_kv`; None: the default of the operations).

    Raises CheckpointError for tensors that do not fit.
    """
    if config.altup is not None:
        return AltUpDecoder(config, parameters, kv)
    if config.block_layers:
        return BlockResidualDecoder(config, parameters, kv)
    if any(layer.mixer is not None and layer.mixer.time_mix is not None for layer in config.layers):
        return RwkvDecoder(config, parameters, kv)
    rope = long_rope(config)
    if rope is not None:
        return LongRopeDecoder(config, parameters, rope)
    return Decoder(config, parameters, kv)


def stored_kv(config: DecoderConfig, ops: Ops, dtype: mx.Dtype, wanted: KVFormat | None) -> KVFormat:
    """Return the format of a decoder's K/V: the requested one, or the unquantized one that the operations choose.

    config: of the decoder.
    ops: that read and write the entries.
    dtype: of the computation.
    wanted: the format that was asked for; None: the operations' choice.

    Raises UsageError, naming the format, where K/V cannot be `wanted`.
    """
    if wanted is None or not wanted.packed:
        return ops.kv_format(dtype)
    reason = None
    if long_rope(config) is not None:
        reason = "LongRoPE turns keys anew as a sequence grows"
    elif any(layer.indexer for layer in config.layers):
        reason = "an indexer chooses entries, which attention copies, and packed ones are read in place"
    elif environment.exact():
        reason = "HEADRACE_EXACT asks for float32 throughout"
    elif not ops.supports_packed(config.head_dim):
        reason = f"the {ops.name} operations do not attend to packed heads of {config.head_dim}"
    if reason is not None:
        raise refused(wanted, reason)
    return ops.packed_format(wanted, config.head_dim)


def refused(wanted: KVFormat, reason: str) -> UsageError:
    """Return the error of K/V that cannot be `wanted`."""
    return UsageError(f"K/V cannot be {wanted.name} here: {reason}", "--kv f16 keeps them unquantized")
