"""Choice of the decoder for a checkpoint, and the abilities that follow from it. Reads headers only.

headrace's own decoder runs the architectures it has, those with recurrent state on the native kernels only; mlx-lm's
classes run all others.

Guard: tests/models/loading/test_load.py.
"""

from typing import Literal

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.fields import text_section
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.quantization import is_known
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.network.long_rope_decoder import long_rope
from headrace.runtime.ops import native, select

NetworkKind = Literal["headrace", "mlx-lm"]


def own_decoder(checkpoint: Checkpoint) -> DecoderConfig | None:
    """Return the configuration for headrace's own decoder; None if only mlx-lm's classes run the checkpoint."""
    part = text_part(checkpoint)
    if not is_known(part.quantization):
        return None
    config = decoder_config(part.config)
    if config is not None and any(layer.mixer for layer in config.layers) and select() is not native:
        return None  # recurrent state is kept next to blocks, which stock MLX does not read
    return config


def network_kind(checkpoint: Checkpoint) -> NetworkKind:
    """Return which of the two decoders runs the checkpoint."""
    if own_decoder(checkpoint) is None:
        return "mlx-lm"
    return "headrace"


def many_sequences(checkpoint: Checkpoint) -> Literal["batched", "turns"]:
    """Return the degree of batching: shared passes, or a pass for each sequence, one after the other."""
    config = own_decoder(checkpoint)
    # LongRoPE rotates all keys of a sequence by short or by long factors, as its length demands. A pass has one list of
    # factors, so sequences of different lengths cannot share it.
    if config is None or long_rope(config) is not None:
        return "turns"
    return "batched"


def verifies_drafts(checkpoint: Checkpoint) -> bool:
    """Return whether draft tokens can be verified, which takes a cache that rolls back. Reads no weights.

    A cache with LongRoPE does not: draft tokens may lengthen a sequence beyond the context of its short factors, and
    all its keys are then computed again with the long ones. A rollback would have to undo that.

    For mlx-lm's classes the network is made; raises what making it raises.
    """
    config = own_decoder(checkpoint)
    if config is None:
        from headrace.models.mlx_lm.network import MlxLmNetwork

        return MlxLmNetwork(checkpoint, device=mx.default_device().type).rolls_back
    return long_rope(config) is None


def context_length(checkpoint: Checkpoint) -> int:
    """Return the model's maximum context, in tokens."""
    length = text_section(checkpoint.config).get("max_position_embeddings")
    if isinstance(length, int) and length > 0:
        return length
    return 2048  # as `decoder_config` assumes; also the default of transformers' Llama
