"""Rotary periods of every supported scaling scheme, one array per kind of layer.

A period is in positions per radian: pair i of a head turns by position / period[i]. Scaling schemes change only the
periods and, for YaRN and LongRoPE, the amplitude.

A new scheme is a case in `make_rope` or `_scaled`, a name in `_ROPES` of `architectures.read`, a row of `_ROPE_NEEDS`
in `checkpoint.normalize`, and a test in `tests/models/network/test_rope.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from headrace.models.architectures.config import RopeConfig
from headrace.runtime.errors import CheckpointError
from headrace.runtime.ops import Rope

_WIDEST = 1 << 16  # head size in an unchecked config


def make_rope(config: RopeConfig, head_dim: int, context_length: int, *, long: bool = False) -> Rope:
    """Return the rotation of a layer.

    config: of the layer.
    head_dim: dimensions of a head.
    context_length: of the model, for scalings that state no factor.
    long: LongRoPE's variant beyond the original context.

    Raises CheckpointError if the scaling section lacks a number.
    """
    proportional = config.kind == "proportional"
    dims = head_dim if proportional else int(head_dim * config.share)
    scaling = config.scaling or {}
    try:
        if dims < 1 or dims % 2 or dims > min(head_dim, _WIDEST):
            raise ValueError(f"{dims} of {head_dim} dimensions of a head cannot turn")
        base = [config.theta ** (i / dims) for i in range(0, dims, 2)]
        if config.kind == "longrope":
            periods, amplitude = _longrope(base, context_length, scaling, long)
        elif proportional:  # pairs after the rotated part have no period
            turned = int(head_dim * config.share) // 2
            periods = [float(scaling.get("factor", 1.0)) * period for period in base[:turned]]
            amplitude = 1.0
        else:
            periods, amplitude = _scaled(config.kind, base, config.theta, dims, context_length, scaling)
        if not all(1e-30 < value < 1e30 for value in (*periods, amplitude)):  # float32's range; refuses NaN too
            raise ValueError("its periods are out of range")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"config.json: the {config.kind} rope scaling section is broken ({error!r})") from None
    if config.backwards:
        periods = [-period for period in periods]
    periods = [*periods, *[math.inf] * (dims // 2 - len(periods))]
    return Rope(dims, mx.array(periods, mx.float32), amplitude)


def neighbours_apart(dims: int) -> mx.array:
    """Return the stored places of `dims` rotated dimensions (dims,): 0, 2, 4 and so on, then 1, 3, 5.

    Stored neighbours turn together; the operations turn dimensions that are half of the rotated part apart.
    """
    return mx.concatenate([mx.arange(0, dims, 2), mx.arange(1, dims, 2)])


def _scaled(
    kind: str, base: list[float], theta: float, dims: int, context_length: int, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """Return the periods of a kind that turns whole heads, and the amplitude.

    base: the periods without scaling, powers of `theta` for `dims` dimensions.
    context_length: see `make_rope`.
    scaling: the section of config.json.
    """
    if kind == "linear":  # position interpolation, arXiv:2306.15595
        return [period * float(scaling["factor"]) for period in base], 1.0
    if kind == "llama3":
        return _llama3(base, scaling), 1.0
    if kind == "yarn":
        return _yarn(base, theta, dims, context_length, scaling)
    return base, 1.0


def _longrope(
    base: list[float], context_length: int, scaling: Mapping[str, Any], long: bool
) -> tuple[list[float], float]:
    """LongRoPE (arXiv:2402.13753): a factor for every pair, from the short or the long list."""
    factors = scaling["long_factor" if long else "short_factor"]
    if not isinstance(factors, list) or len(factors) != len(base):
        raise ValueError("its factors are not one for each pair of a head")
    trained = float(scaling["original_max_position_embeddings"])
    stretch = float(scaling.get("factor") or context_length / trained)
    amplitude = 1.0
    if stretch > 1:
        amplitude = math.sqrt(1 + math.log(stretch) / math.log(trained))
    periods = [float(factor) * period for factor, period in zip(factors, base, strict=True)]
    return periods, float(scaling.get("attention_factor") or amplitude)


def _llama3(base: list[float], scaling: Mapping[str, Any]) -> list[float]:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those in between blended."""
    factor = float(scaling["factor"])
    low = float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    trained = float(scaling.get("original_max_position_embeddings", 8192))

    def stretch(period: float) -> float:
        turns = trained / (2 * math.pi * period)  # full turns within the trained context
        if turns > high:
            return period
        if turns < low:
            return period * factor
        smooth = (turns - low) / (high - low)
        return period / ((1 - smooth) / factor + smooth)

    return [stretch(period) for period in base]


def _yarn(
    base: list[float], theta: float, dims: int, context_length: int, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """YaRN (arXiv:2309.00071): interpolate slow pairs, keep fast ones, ramp between; sharpen by the amplitude."""
    factor = float(scaling.get("factor") or context_length / float(scaling["original_max_position_embeddings"]))
    trained = float(scaling.get("original_max_position_embeddings", 4096))

    def pair_with(turns: float) -> float:
        """Return the pair that makes so many full turns within the trained context.

        Pair i has the period theta ** (2 i / dims): solved for i, where trained / (2 pi period) are the turns.
        """
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    # Pairs below `low` turn fast and are kept, those above `high` are interpolated. 32 and 1 are the paper's for Llama.
    low = pair_with(float(scaling.get("beta_fast") or 32))
    high = pair_with(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    span = max(high - low, 0.001)  # no division by zero, as in transformers

    def blend(pair: int, period: float) -> float:
        keep = 1 - min(max((pair - low) / span, 0.0), 1.0)
        return 1 / (keep / period + (1 - keep) / (period * factor))

    def magnitude(weight: float) -> float:
        """Return the factor of queries and keys by the paper's fit, 0.1 ln(s) + 1. weight: `mscale` of DeepSeek."""
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    amplitude = magnitude(1.0)
    mscale = scaling.get("mscale")
    all_dims = scaling.get("mscale_all_dim")
    if mscale and all_dims:
        amplitude = magnitude(float(mscale)) / magnitude(float(all_dims))
    amplitude = float(scaling.get("attention_factor") or amplitude)
    return [blend(pair, period) for pair, period in enumerate(base)], amplitude
