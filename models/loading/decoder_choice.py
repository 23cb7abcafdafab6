"""Choice of the decoder for a checkpoint, and the abilities that follow from it. Reads headers only.

headrace's own decoder runs the architectures it has; mlx-lm's classes run all others.
"""

from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from headrace.models.checkpoint.quantization import is_known
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.network.config import DecoderConfig, decoder_config
from headrace.models.network.long_rope_decoder import long_rope

if TYPE_CHECKING:
    from headrace.models.network.mlx_lm import MlxLmNetwork

NetworkKind = Literal["headrace", "mlx-lm"]


def own_decoder(checkpoint: Checkpoint) -> DecoderConfig | None:
    """What headrace's own decoder needs to run this checkpoint; None where mlx-lm's classes do. Headers only."""
    part = text_part(checkpoint)
    return decoder_config(part.config) if is_known(part.quantization) else None


def network_kind(checkpoint: Checkpoint) -> NetworkKind:
    """Which decoder runs this checkpoint. Headers only."""
    return "mlx-lm" if own_decoder(checkpoint) is None else "headrace"


def many_sequences(checkpoint: Checkpoint, network: "MlxLmNetwork | None") -> Literal["batched", "steps", "turns"]:
    """Whether several sequences share passes, only their steps (prompts take turns), or none. Reads no weights.

    network: of mlx-lm's, where its classes run this checkpoint.
    """
    config = own_decoder(checkpoint)
    if config is None:
        return "steps" if network is not None and network.can_join else "turns"
    return "batched" if long_rope(config) is None else "turns"


def verifies_drafts(checkpoint: Checkpoint) -> bool:
    """Whether guessed tokens can be verified: its caches can take back what was wrong. Reads no weights.

    Raises what loading a model of mlx-lm's classes raises: those have to be made first.
    """
    config = own_decoder(checkpoint)
    if config is None:
        from headrace.models.network.mlx_lm import MlxLmNetwork

        return MlxLmNetwork(checkpoint, device=mx.default_device().type).rolls_back
    return long_rope(config) is None


def context_length(checkpoint: Checkpoint) -> int:
    """The longest context the model was made for."""
    text = checkpoint.config.get("text_config", checkpoint.config)
    length = text.get("max_position_embeddings") if isinstance(text, dict) else None
    return length if isinstance(length, int) and length > 0 else 2048
