"""Layers with recurrent state in a config.json: gated delta networks, Mamba-2, short convolutions."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.models.network.config_fields import Fields
from headrace.runtime.errors import CheckpointError

_RECURRENT = ("linear_attention", "mamba", "conv")  # in `layer_types`


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """Sizes of a layer's mixer; see `runtime.ops.MixerSpec`. eps: of its own norm."""

    kind: Literal["delta", "ssm", "conv"]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    steps: tuple[float, float] = (0.0, float("inf"))

    @property
    def fits(self) -> bool:
        """True if the kernels run it."""
        recurs = self.key_dim % 16 == 0 and self.key_heads > 0 and self.heads % self.key_heads == 0
        return self.width <= 16 and (self.kind == "conv" or recurs)

    @property
    def inner(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state: inputs of the convolution, and a float32 matrix per head."""
        return 4 * ((self.width - 1) * self.channels + (0 if self.kind == "conv" else self.inner * self.key_dim))


def projections_into(mixer: MixerConfig) -> dict[str, int]:
    """Return the stored projections into a mixer and the rows of each."""
    if mixer.kind == "delta":
        rows = {"qkv": mixer.channels, "z": mixer.inner, "b": mixer.heads, "a": mixer.heads}
        return {f"in_proj_{name}": count for name, count in rows.items()}
    return {"in_proj": 3 * mixer.inner if mixer.kind == "conv" else mixer.inner + mixer.channels + mixer.heads}


def mixer_of(fields: Fields) -> MixerConfig | None:
    """Return the mixer of all layers that have one; None if no layer has."""
    reader = _READERS.get(fields.values["model_type"])
    return None if reader is None else reader(fields)


def mixer_layers(fields: Fields, count: int) -> list[MixerConfig | None]:
    """Return each layer's mixer, None for layers with attention."""
    mixer = mixer_of(fields)
    if mixer is None:
        return [None] * count
    return [mixer if recurrent else None for recurrent in _recurrent(fields, count)]


def _recurrent(fields: Fields, count: int) -> list[bool]:
    kinds, listed = fields.values.get("layer_types"), fields.values.get("full_attn_idxs")
    if isinstance(listed, list):
        return [i not in listed for i in range(count)]
    if kinds is None and fields.values["model_type"] == "qwen3_5":
        interval = fields.count("full_attention_interval", default=4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CheckpointError(f"config.json: layer_types does not list {count} layers")
    return [kind in _RECURRENT for kind in kinds]


def _delta(fields: Fields) -> MixerConfig:
    return MixerConfig(
        "delta",
        heads=fields.count("linear_num_value_heads"),
        key_heads=fields.count("linear_num_key_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        width=fields.count("linear_conv_kernel_dim", default=4),
        eps=fields.positive("rms_norm_eps"),
    )


def _mamba2(fields: Fields) -> MixerConfig | None:
    if fields.values.get("mamba_n_heads") is None:
        return None
    limits = fields.values.get("time_step_limit") or [0.001, 100.0]
    if not isinstance(limits, list) or len(limits) != 2 or not all(_is_step(limit) for limit in limits):
        raise CheckpointError(f"config.json: time_step_limit must be two numbers, not {limits!r:.60}")
    return MixerConfig(
        "ssm",
        heads=fields.count("mamba_n_heads"),
        key_heads=fields.count("mamba_n_groups", default=1),
        key_dim=fields.count("mamba_d_state"),
        value_dim=fields.count("mamba_d_head"),
        width=fields.count("mamba_d_conv", default=4),
        eps=fields.positive("rms_norm_eps"),
        steps=(float(limits[0]), float(limits[1])),
    )


def _is_step(limit: object) -> bool:
    """Return whether this is a step size, or infinity for no limit."""
    return isinstance(limit, int | float) and (0 <= limit <= sys.float_info.max or limit == float("inf"))


def _short_convolution(fields: Fields) -> MixerConfig:
    width = fields.count("hidden_size")
    return MixerConfig("conv", 1, 0, 0, width, fields.count("conv_L_cache"), fields.positive("norm_eps"))


_READERS: dict[str, Callable[[Fields], MixerConfig | None]] = {
    "qwen3_5": _delta,
    "granitemoehybrid": _mamba2,
    "lfm2": _short_convolution,
}
