"""Storage format of our decoder's K/V: the requested one, or the reason against it. mlx-lm: `models.mlx_lm.cache`.

Unquantized formats are the operations' choice (`Ops.kv_format`): asking for f16 asks for that.

Guards: tests/parity/test_indexed.py for indexers, tests/app/bench/quality/test_quality_run.py for another refusal.
"""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.long_rope_decoder import long_rope
from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import Ops
from headrace.runtime.ops.kv_format import KVFormat

_HINT = "--kv f16 keeps them unquantized"


def stored_kv(config: DecoderConfig, ops: Ops, dtype: mx.Dtype, wanted: KVFormat | None) -> KVFormat:
    """Return the format of a decoder's K/V.

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
    return UsageError(f"K/V cannot be {wanted.name} here: {reason}", _HINT)
