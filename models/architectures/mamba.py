"""Mamba-2: layers of a norm and a recurrent mixer alone, without attention and feed-forwards (arXiv:2405.21060).

The mixer's heads and groups stand in place of attention's in the configuration: ranks divide the model by them. No
layer has K/V, so a conversation's memory is that of its state, whatever its length.
"""

from dataclasses import replace

from headrace.models.architectures.architecture import MIXER, Architecture, Config
from headrace.models.architectures.config import DecoderConfig, Family, MixerConfig, NormNames
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import state_usual_names
from headrace.models.architectures.mixers import mixer_sizes, step_limits

# Tokens. Nothing in these models has positions, and configs state no limit: that of llama.cpp's converter.
_CONTEXT = 1 << 20
_NAMES = (("model.embeddings.", "model.embed_tokens."), ("model.norm_f.", "model.norm."))


def _mamba2_keys(config: Config) -> None:
    """Add the inner width, which transformers' class computes and mlx-lm's reads, and the mixer's heads."""
    width = config.get("hidden_size")
    factor = config.get("expand")
    if type(width) is int and isinstance(factor, int | float):
        config.setdefault("intermediate_size", int(width * factor))
    state_usual_names(config, {"num_heads": "num_attention_heads", "n_groups": "num_key_value_heads"})


def _mamba2(fields: Fields) -> MixerConfig:
    """Return the mixer. Its norm is over each group of heads, as in the kernels that these models were trained with."""
    size = fields.count("ssm_state_size", default=fields.values.get("state_size"))
    sizes = mixer_sizes(
        "ssm",
        heads=fields.count("num_heads"),
        key_heads=fields.count("n_groups"),
        key_dim=size,
        value_dim=fields.count("head_dim"),
        width=fields.count("conv_kernel", default=4),
    )
    limits = step_limits(fields, 0.0, float("inf"))
    return MixerConfig(sizes, fields.positive("layer_norm_epsilon"), limits, norm_parts=sizes.key_heads)


def _without_feed_forwards(_fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    return replace(decoder, layers=tuple(replace(layer, feeds=False) for layer in decoder.layers))


ROWS = (
    Architecture(
        "mamba2",
        Family(NormNames(attention="norm", mlp=None)),
        add_keys=_mamba2_keys,
        context=_CONTEXT,
        tensor_names=_NAMES,
        eps="layer_norm_epsilon",
        rotates=lambda _fields: False,
        inner_size=lambda _fields: 1,
        mixer=_mamba2,
        recurrent=lambda _fields, layers: [True] * layers,
        biases={"use_bias": MIXER},
        complete=_without_feed_forwards,
    ),
)
