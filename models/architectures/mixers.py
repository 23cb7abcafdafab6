"""Recurrent mixing in a config.json, as several families state it: gated delta networks, Mamba-2.

A family names one of these as `Architecture.mixer`, and the layers that have it as `Architecture.recurrent`.
tests/parity/test_mlx_lm_families.py compares logits.
"""

import sys
from typing import TYPE_CHECKING

from headrace.models.architectures.config import MixerConfig
from headrace.models.architectures.fields import Fields
from headrace.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from headrace.runtime.ops.mixers import MixerKind, MixerSizes


def mixer_sizes(
    kind: "MixerKind", heads: int, *, key_heads: int, key_dim: int, value_dim: int, width: int
) -> "MixerSizes":
    """Return `runtime.ops.MixerSizes`, without an import of MLX by the table of architectures."""
    from headrace.runtime.ops import MixerSizes

    return MixerSizes(kind, heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, width=width)


def gated_delta(fields: Fields) -> MixerConfig:
    """Return a gated delta network, as in Qwen 3.5."""
    sizes = mixer_sizes(
        "delta",
        heads=fields.count("linear_num_value_heads"),
        key_heads=fields.count("linear_num_key_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        width=fields.count("linear_conv_kernel_dim", default=4),
    )
    return MixerConfig(sizes, eps=fields.positive("rms_norm_eps"))


def decay_bound(fields: Fields, key: str, default: float | None = None) -> float:
    """Return the bound of a delta network's decays, which configs state as a negative number; 0 for no bound."""
    stated = fields.values.get(key, default)
    if stated is None and default is None:
        return 0.0
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not -1e3 < stated < 0:
        raise CheckpointError(f"config.json: {key} must be a negative number, not {stated!r:.60}")
    return -float(stated)


def mamba2(fields: Fields) -> MixerConfig | None:
    """Return a Mamba-2 mixer, as in Granite; None without heads."""
    if fields.values.get("mamba_n_heads") is None:
        return None
    sizes = mixer_sizes(
        "ssm",
        heads=fields.count("mamba_n_heads"),
        key_heads=fields.count("mamba_n_groups", default=1),
        key_dim=fields.count("mamba_d_state"),
        value_dim=fields.count("mamba_d_head"),
        width=fields.count("mamba_d_conv", default=4),
    )
    return MixerConfig(sizes, fields.positive("rms_norm_eps"), step_limits(fields, 0.001, 100.0))


def step_limits(fields: Fields, least: float, maximum: float) -> tuple[float, float]:
    """Return the least and the largest step of a Mamba-2 mixer. least, maximum: defaults."""
    limits = fields.values.get("time_step_limit") or [least, maximum]
    if not isinstance(limits, list) or len(limits) != 2 or not all(_is_step(limit) for limit in limits):
        raise CheckpointError(f"config.json: time_step_limit must be two numbers, not {limits!r:.60}")
    return float(limits[0]), float(limits[1])


def _is_step(limit: object) -> bool:
    """Return whether this is a step size, or infinity for no limit."""
    return isinstance(limit, int | float) and (0 <= limit <= sys.float_info.max or limit == float("inf"))


def recurrent_layers(fields: Fields, count: int) -> list[bool]:
    """Return for each layer whether it has recurrent state: not of `full_attn_idxs`, or by `layer_types`."""
    attending = fields.values.get("full_attn_idxs")
    if isinstance(attending, list):
        return [i not in attending for i in range(count)]
    kinds = fields.required_list("layer_types", count)
    # Qwen and OLMo, Granite, LFM2. Every other kind attends.
    return [kind in ("linear_attention", "mamba", "conv") for kind in kinds]


def all_recurrent(_fields: Fields, count: int) -> list[bool]:
    """Return True for every layer: `Architecture.recurrent` of models with recurrent state in all layers."""
    return [True] * count


def recurrent_by_interval(fields: Fields, count: int) -> list[bool]:
    """Return `recurrent_layers`; without lists, all but every `full_attention_interval`-th."""
    if fields.values.get("layer_types") is not None or isinstance(fields.values.get("full_attn_idxs"), list):
        return recurrent_layers(fields, count)
    interval = fields.count("full_attention_interval", default=4)
    return [(i + 1) % interval != 0 for i in range(count)]
