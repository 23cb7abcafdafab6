"""Falcon-H1: Mamba-2 next to attention in every layer, and multipliers of its weights.

The multipliers (maximal update parametrization, arXiv:2203.03466) are applied to the weights. MLX's conversions have
all but that of the values folded in. Files of llama.cpp have all folded in, so `gguf/architectures/mamba.py` sets
their multipliers to 1 (`_ONES`). `key_multiplier` is no factor of weights here: it multiplies all scores.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.models.architectures.architecture import BIASES, Architecture
from headrace.models.architectures.config import DecoderConfig, Family, MixerConfig
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.mixers import all_recurrent, mamba2
from headrace.runtime.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx

# Multipliers of the table and of the output projection: defaults of the family's classes.
_EMBEDDING = 5.656854249492381
_HEAD = 0.0390625


def _logit_factor(fields: Fields) -> float:
    """Return the factor of logits from a tied table, which has the embedding's multiplier folded in."""
    table = fields.positive("embedding_multiplier", default=_EMBEDDING)
    return fields.positive("lm_head_multiplier", default=_HEAD) / table


def _multiplied(arrays: "dict[str, mx.array]", fields: Fields, folded: bool) -> "dict[str, mx.array]":
    """Return the arrays, lazily, with the multipliers of their projections.

    folded: the arrays are of one of MLX's conversions, which have the multipliers of weights in them. (None of biases:
    no published model has those.)
    """
    factors = {"self_attn.v_proj": fields.positive("attention_in_multiplier", default=1.0)}
    if not folded:
        factors |= _unfolded(fields)
    return {name: _scaled(name, array, factors, fields) for name, array in arrays.items()}


def _unfolded(fields: Fields) -> dict[str, float]:
    """Return the factors that MLX's conversions have folded in, by the end of a module's name."""
    attention = fields.positive("attention_in_multiplier", default=1.0)
    gate, down = _list(fields, "mlp_multipliers", [0.8838834764831844, 0.5859375])
    return {
        "embed_tokens": fields.positive("embedding_multiplier", default=_EMBEDDING),
        "lm_head": fields.positive("lm_head_multiplier", default=_HEAD),
        "self_attn.q_proj": attention,
        "self_attn.k_proj": attention,
        "self_attn.o_proj": fields.positive("attention_out_multiplier", default=0.9375),
        "mixer.out_proj": fields.positive("ssm_out_multiplier", default=0.23570226039551587),
        "mixer.in_proj": fields.positive("ssm_in_multiplier", default=1.25),
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
    }


def _scaled(name: str, array: "mx.array", factors: Mapping[str, float], fields: Fields) -> "mx.array":
    """Return a tensor with its factors. The 32-bit codes of a quantized weight stay: their scales and offsets change.

    name: with the part at its end: weight, or bias of a projection; scales or biases (offsets) of a quantized weight.
    factors: by the end of a module's name.
    """
    module, _, part = name.rpartition(".")
    key = next((key for key in factors if module.endswith(key)), None)
    if key is None or str(array.dtype).endswith("uint32"):
        return array
    # These multipliers scale a projection's input, so its bias stays. Others scale the output, bias included.
    scales_input = key in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mixer.in_proj")
    result = array
    if part in ("weight", "scales", "biases") or (part == "bias" and not scales_input):
        result = array * factors[key]
    if key == "mixer.in_proj":
        rows = _row_factors(fields, array.shape[0])  # they scale the output, so the bias (rows,) too
        result = result * rows.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype)
    return result


def _row_factors(fields: Fields, rows: int) -> "mx.array":
    """Return the factor of each row of a mixer's projection: z, x, B, C and dt (rows,)."""
    import mlx.core as mx

    heads = fields.count("mamba_n_heads")
    groups = fields.count("mamba_n_groups", default=1)
    keys = groups * fields.count("mamba_d_state")
    inner = (rows - 2 * keys - heads) // 2  # of z, and of x
    multipliers = _list(
        fields, "ssm_multipliers", [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]
    )
    sizes = (inner, inner, keys, keys, heads)
    return mx.concatenate([mx.full((size,), factor) for size, factor in zip(sizes, multipliers, strict=True)])


def _list(fields: Fields, key: str, default: list[float]) -> list[float]:
    """Return a list of positive numbers, as long as its default."""
    stated = fields.values.get(key)
    if stated is None:
        stated = default
    if not isinstance(stated, list) or len(stated) != len(default):
        raise CheckpointError(f"config.json: {key} must list {len(default)} numbers, not {stated!r:.60}")
    return [Fields({key: value}).positive(key) for value in stated]


def _mixer(fields: Fields) -> MixerConfig:
    """Return the mixer. The size of a head and the limits of steps that the config may state are not used."""
    values = fields.values
    heads = fields.count("mamba_n_heads")
    hidden = fields.count("hidden_size")
    inner = fields.count("mamba_d_ssm", default=fields.count("mamba_expand", default=2) * hidden)
    if inner % heads:
        raise CheckpointError(f"config.json: {heads} Mamba heads cannot share {inner} numbers")
    mixer = mamba2(Fields({**values, "mamba_d_head": inner // heads, "time_step_limit": [0.0, float("inf")]}))
    assert mixer is not None  # `mamba_n_heads` is counted above
    # Its norm is over each group of heads that share B and C.
    return replace(mixer, norm_parts=mixer.sizes.key_heads if values.get("mamba_rms_norm") else 0)


def _complete(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with the multipliers that are no factors of weights."""
    tied = fields.values.get("tie_word_embeddings", True)
    return replace(
        decoder,
        attention_scale=decoder.attention_scale * fields.positive("key_multiplier", default=1.0),
        logit_scale=_logit_factor(fields) if tied else 1.0,
    )


def _runs(fields: Fields) -> bool:
    """Return False for norms before the gates, which only mlx-lm's class has."""
    return not (fields.values.get("mamba_rms_norm") and fields.values.get("mamba_norm_before_gate"))


ROWS = (
    Architecture(
        "falcon_h1",
        Family(mixes_with_attention=True),
        states_head_dim=True,
        tensor_names=(
            (".mamba.", ".mixer."),
            (".feed_forward.", ".mlp."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            ("model.final_layernorm", "model.norm"),
        ),
        multiply=_multiplied,
        tied=True,
        mixer=_mixer,
        recurrent=all_recurrent,
        biases={**BIASES, "mamba_proj_bias": ("mixer.in_proj",), "projectors_bias": ("mixer.out_proj",)},
        runs=_runs,
        complete=_complete,
    ),
)
