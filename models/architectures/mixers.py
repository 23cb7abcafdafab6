"""Layers with recurrent state in a config.json: gated delta networks, Mamba-2, short convolutions."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layer_pairs import kda_layers, layer_pairs
from headrace.runtime.errors import CheckpointError
from headrace.runtime.ops import MixerSizes

_RECURRENT = ("linear_attention", "mamba", "conv")  # in `layer_types`


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """A layer's mixer; see `runtime.ops.MixerSpec`.

    eps: of its own norm. steps: least and most step size. norm_parts: parts that are normalized by themselves, with
    "ssm"; 0: no norm. by_key_head: "delta" has its projections joined, with the rows of each key head together
    (Qwen3-Next). apart: all projections and convolutions are stored apart (OLMo hybrid, Kimi Linear). rank: size of the
    first of two products that lead to gates and to decays, with "kda".
    """

    sizes: MixerSizes
    eps: float
    steps: tuple[float, float] = (0.0, float("inf"))
    by_key_head: bool = False
    norm_parts: int = 1
    apart: bool = False
    most_beta: float = 1.0
    rank: int = 0

    @property
    def fits(self) -> bool:
        """True if the kernels run it."""
        sizes = self.sizes
        recurs = sizes.key_dim % 16 == 0 and sizes.key_heads > 0 and sizes.heads % sizes.key_heads == 0
        parts = not self.norm_parts or sizes.inner % self.norm_parts == 0
        return sizes.width <= 16 and parts and (sizes.kind == "conv" or recurs)


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
    if fields.values["model_type"] == "falcon_h1":
        return [True] * count
    if fields.values["model_type"] == "nemotron_h":
        return [letters.startswith("M") for letters in layer_pairs(fields.values)]
    if fields.values["model_type"] == "kimi_linear":
        return [i in kda_layers(fields.values) for i in range(count)]
    kinds = fields.values.get("layer_types")
    listed = fields.values.get("full_attn_idxs")
    if isinstance(listed, list):
        return [i not in listed for i in range(count)]
    if kinds is None and _READERS[fields.values["model_type"]] in (_delta, _olmo):
        interval = fields.count("full_attention_interval", default=4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CheckpointError(f"config.json: layer_types does not list {count} layers")
    return [kind in _RECURRENT for kind in kinds]


def _delta(fields: Fields) -> MixerConfig:
    sizes = MixerSizes(
        "delta",
        heads=fields.count("linear_num_value_heads"),
        key_heads=fields.count("linear_num_key_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        width=fields.count("linear_conv_kernel_dim", default=4),
    )
    joined = fields.values["model_type"] == "qwen3_next"
    return MixerConfig(sizes, eps=fields.positive("rms_norm_eps"), by_key_head=joined)


def _mamba2(fields: Fields) -> MixerConfig | None:
    if fields.values.get("mamba_n_heads") is None:
        return None
    return _ssm(fields, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _ssm(fields: Fields, heads: str, head: str, groups: str, state: str, width: str) -> MixerConfig:
    """Return a Mamba-2 mixer. The arguments are keys."""
    nemotron = fields.values["model_type"] == "nemotron_h"
    limits = fields.values.get("time_step_limit") or ([0.0, float("inf")] if nemotron else [0.001, 100.0])
    if not isinstance(limits, list) or len(limits) != 2 or not all(_is_step(limit) for limit in limits):
        raise CheckpointError(f"config.json: time_step_limit must be two numbers, not {limits!r:.60}")
    sizes = MixerSizes(
        "ssm",
        heads=fields.count(heads),
        key_heads=fields.count(groups, default=1),
        key_dim=fields.count(state),
        value_dim=fields.count(head),
        width=fields.count(width, default=4),
    )
    eps = fields.positive("layer_norm_epsilon" if nemotron else "rms_norm_eps")
    steps = float(limits[0]), float(limits[1])
    return MixerConfig(sizes, eps, steps, norm_parts=sizes.key_heads if nemotron else 1)


def _falcon(fields: Fields) -> MixerConfig | None:
    values = fields.values
    if values.get("mamba_rms_norm") and values.get("mamba_norm_before_gate"):
        return None
    heads = fields.count("mamba_n_heads")
    hidden = fields.count("hidden_size")
    inner = fields.count("mamba_d_ssm", default=fields.count("mamba_expand", default=2) * hidden)
    if inner % heads:
        raise CheckpointError(f"config.json: {heads} Mamba heads cannot share {inner} numbers")
    known = {**values, "mamba_d_head": inner // heads, "time_step_limit": [0.0, float("inf")]}
    mixer = _mamba2(Fields(known))
    assert mixer is not None
    return replace(mixer, norm_parts=mixer.sizes.key_heads if values.get("mamba_rms_norm") else 0)


def _nemotron(fields: Fields) -> MixerConfig:
    return _ssm(fields, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def _olmo(fields: Fields) -> MixerConfig:
    most = 2.0 if fields.values.get("linear_allow_neg_eigval", True) else 1.0
    eps = fields.positive("layer_norm_epsilon", default=1e-5)
    return replace(_delta(fields), eps=eps, apart=True, most_beta=most)


def _kimi(fields: Fields) -> MixerConfig:
    inner = Fields(fields.section("linear_attn_config"))
    heads = inner.count("num_heads")
    size = inner.count("head_dim")
    width = inner.count("short_conv_kernel_size", default=4)
    sizes = MixerSizes("kda", heads, key_heads=heads, key_dim=size, value_dim=size, width=width)
    return MixerConfig(sizes, fields.positive("rms_norm_eps"), apart=True, rank=size)


def _is_step(limit: object) -> bool:
    """Return whether this is a step size, or infinity for no limit."""
    return isinstance(limit, int | float) and (0 <= limit <= sys.float_info.max or limit == float("inf"))


def _short_convolution(fields: Fields) -> MixerConfig:
    width = fields.count("hidden_size")
    return MixerConfig(MixerSizes("conv", 1, 0, 0, width, fields.count("conv_L_cache")), fields.positive("norm_eps"))


_READERS: dict[str, Callable[[Fields], MixerConfig | None]] = {
    "qwen3_5": _delta, "qwen3_5_moe": _delta, "qwen3_next": _delta, "granitemoehybrid": _mamba2,
    "lfm2": _short_convolution, "lfm2_moe": _short_convolution, "falcon_h1": _falcon, "nemotron_h": _nemotron,
    "olmo_hybrid": _olmo, "kimi_linear": _kimi,
}  # fmt: skip
