"""RWKV-7: layers with the row before and a recurrence in place of attention; `network.rwkv_decoder` has the formulas.

Heads of the recurrence stand in place of attention's in the configuration. Names of tensors and keys are those of
flash-linear-attention, which mlx-lm's class has, too.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture, Config
from headrace.models.architectures.config import DecoderConfig, Family, MixerConfig, NormNames, TimeMixConfig
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import widened
from headrace.models.architectures.mixers import all_recurrent, mixer_sizes

_CONTEXT = 1 << 20  # tokens, as in llama.cpp's converter: nothing has positions
_ROUNDED = 32  # widths of feed-forwards that no config states are multiples of it
_RANKS = ("decay_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim", "v_low_rank_dim")  # as in `TimeMixConfig`


def _add_keys(config: Config) -> None:
    """Add the number of heads, and the width of the feed-forward where only its ratio is stated."""
    width = config.get("hidden_size")
    size = config.get("head_dim")
    if type(width) is not int:
        return
    if type(size) is int and size > 0:
        config["num_attention_heads"] = config["num_key_value_heads"] = width // size
    if config.get("intermediate_size") is None:
        inner = widened(config, "hidden_ratio")
        if inner is not None:
            config["intermediate_size"] = -(-inner // _ROUNDED) * _ROUNDED  # rounded up


def _mixer(fields: Fields) -> MixerConfig:
    """Return the states of a layer: the rows before of both halves, and the recurrence between them."""
    width = fields.count("hidden_size")
    size = fields.count("head_dim")
    heads = width // size
    shift = mixer_sizes("shift", heads=6, key_heads=0, key_dim=0, value_dim=width, width=2)
    channel_shift = mixer_sizes("shift", heads=1, key_heads=0, key_dim=0, value_dim=width, width=2)
    recurrence = mixer_sizes("wkv", heads, key_heads=heads, key_dim=size, value_dim=size, width=1)
    ranks = TimeMixConfig(*(fields.count(name) for name in _RANKS))
    return MixerConfig(shift, fields.positive("norm_eps"), later=(recurrence, channel_shift), time_mix=ranks)


def _runs(fields: Fields) -> bool:
    """Return whether all sizes are whole registers of 16 numbers, and heads fill the width."""
    sizes_fit = all(fields.count(name) % 16 == 0 for name in (*_RANKS, "head_dim"))
    return sizes_fit and fields.count("hidden_size") % fields.count("head_dim") == 0


def _complete(_fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Leave out the share of the first layer's values in the first layer."""
    first, *others = decoder.layers
    assert first.mixer is not None
    assert first.mixer.time_mix is not None
    mixer = replace(first.mixer, time_mix=replace(first.mixer.time_mix, value=0))
    return replace(decoder, layers=(replace(first, mixer=mixer), *others))


ROWS = (
    Architecture(
        "rwkv7",
        Family(
            NormNames(attention="attn_norm", mlp="ffn_norm"),
            activation="relu2",
            norm="layer",
            norm_bias=True,
            embedding_norm=True,
        ),
        defaults={"norm_eps": 1e-5},
        add_keys=_add_keys,
        context=_CONTEXT,
        tensor_names=(
            ("model.embeddings.", "model.embed_tokens."),
            ("model.layers.0.pre_norm.", "model.embed_norm."),
            (".ffn.key.", ".mlp.up_proj."),
            (".ffn.value.", ".mlp.down_proj."),
            (".ffn.x_k", ".mlp.x_k"),
        ),
        eps="norm_eps",
        activations=("sqrelu", "relu2"),
        only={"norm_first": True, "norm_bias": True, "attn": None},
        rotates=lambda _fields: False,
        mixer=_mixer,
        recurrent=all_recurrent,
        biased=tuple(f"attn.{letter}_lora.lora.2" for letter in "wav"),
        runs=_runs,
        complete=_complete,
    ),
)
