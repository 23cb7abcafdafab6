"""Mamba (arXiv:2312.00752) and Mamba-2 (arXiv:2405.21060): layers of a norm and a recurrent mixer alone.

They have neither attention nor feed-forwards. Heads and groups of Mamba-2 stand in place of attention's in the
configuration: ranks divide the model by them. No layer has K/V, so a conversation's memory is that of its state,
whatever its length.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import MIXER, Architecture, Config
from headrace.models.architectures.config import DecoderConfig, Family, MixerConfig, NormNames, ScanConfig
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import state_usual_names, widened
from headrace.models.architectures.mixers import all_recurrent, mixer_sizes, step_limits

# Tokens. Nothing in these models has positions, and configs state no limit: that of llama.cpp's converter.
_CONTEXT = 1 << 20
_NAMES = (("model.embeddings.", "model.embed_tokens."), ("model.norm_f.", "model.norm."))


def _mamba2_keys(config: Config) -> None:
    """Add the inner width, which transformers' class computes and mlx-lm's reads, and the mixer's heads."""
    inner = widened(config, "expand")
    if inner is not None:
        config.setdefault("intermediate_size", inner)
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


def _mamba_keys(config: Config) -> None:
    """Add the rank of steps where it is "auto", a sixteenth of the width, and one head in place of attention's."""
    width = config.get("hidden_size")
    if config.get("time_step_rank") == "auto" and type(width) is int:
        config["time_step_rank"] = -(-width // 16)  # rounded up, as in transformers' class
    config["num_attention_heads"] = config["num_key_value_heads"] = 1


def _mamba(fields: Fields) -> MixerConfig:
    """Return the convolution, and the scan after it, which has a decay for each number of its state."""
    inner = fields.count("intermediate_size")
    width = fields.count("conv_kernel", default=4)
    convolution = mixer_sizes("conv", heads=1, key_heads=0, key_dim=0, value_dim=inner, width=width)
    scan = mixer_sizes("scan", inner, key_heads=1, key_dim=fields.count("state_size"), value_dim=1, width=1)
    norm_eps = None
    if fields.values.get("use_bcdt_rms"):
        norm_eps = fields.positive("mixer_rms_eps", default=1e-6)
    products = ScanConfig(fields.count("time_step_rank"), norm_eps)
    return MixerConfig(convolution, fields.positive("layer_norm_epsilon"), later=(scan,), scan=products)


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
        inner_size=lambda _fields: 1,  # no feed-forwards: `intermediate_size` of a config, if any, is the mixer's
        mixer=_mamba2,
        recurrent=all_recurrent,
        biases={"use_bias": MIXER},
        complete=_without_feed_forwards,
    ),
    Architecture(
        "mamba",
        Family(NormNames(attention="norm", mlp=None)),
        defaults={"layer_norm_epsilon": 1e-5, "use_conv_bias": True},
        add_keys=_mamba_keys,
        context=_CONTEXT,
        tensor_names=_NAMES,
        tied=True,
        eps="layer_norm_epsilon",
        rotates=lambda _fields: False,
        inner_size=lambda _fields: 1,  # no feed-forwards: `intermediate_size` of a config, if any, is the mixer's
        mixer=_mamba,
        recurrent=all_recurrent,
        biases={"use_bias": MIXER, "use_conv_bias": ("mixer.conv1d",)},
        biased=("mixer.dt_proj",),
        complete=_without_feed_forwards,
    ),
    Architecture(
        "falcon_mamba",
        same_as="mamba",
        constants={"use_bcdt_rms": True, "mixer_rms_eps": 1e-6},
    ),
)
