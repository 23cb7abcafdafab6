"""Weights of layers with recurrent state: projections in the order of `runtime.ops.MixerSizes`, and small vectors."""

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig, MixerConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import mixer_gates, mixer_inputs, mixer_output
from headrace.runtime.ops import MixerSizes, MixerSpec, Weight


def read_mixer(
    config: DecoderConfig, parameters: Parameters, prefix: str, mixer: MixerConfig
) -> tuple[MixerSpec, list[Weight], Weight]:
    """Return a layer's mixer, the projections into it, and the one out of it."""
    at = f"{prefix}.mixer"
    sizes = mixer.sizes
    inputs = mixer_inputs(config, mixer)
    output = parameters.tensor(prefix, mixer_output(config, mixer))
    taps, bias = _taps(parameters, at, mixer)
    if sizes.kind == "conv":
        spec = MixerSpec(sizes, taps=taps, tap_bias=bias)
        return spec, parameters.fused(prefix, inputs), output
    rate = -mx.exp(parameters.vector(f"{at}.A_log", sizes.heads).astype(mx.float32))
    step_bias = parameters.vector(f"{at}.dt_bias", sizes.decays)
    if sizes.kind != "ssm":
        norm = parameters.vector(f"{at}.norm.weight", sizes.value_dim)
        max_beta = mixer.most_beta
        spec = MixerSpec(sizes, taps, bias, rate, step_bias, most_beta=max_beta, norm=norm, norm_eps=mixer.eps)
        order = _by_key_head(sizes) if mixer.by_key_head else None
        return spec, parameters.fused(prefix, inputs, order), output
    order = _as_queries(sizes)
    spec = MixerSpec(
        sizes,
        taps=taps[:, order],
        tap_bias=None if bias is None else bias[order],
        rate=rate,
        step_bias=step_bias,
        steps=mixer.steps,
        skip=parameters.vector(f"{at}.D", sizes.heads),
        norm=_norm(parameters, f"{at}.norm.weight", mixer),
        norm_first=False,
        norm_eps=mixer.eps,
    )
    rows = inputs[0].rows
    turned = mx.concatenate([sizes.inner + order, mx.arange(sizes.inner), mx.arange(rows - sizes.heads, rows)])
    return spec, parameters.fused(prefix, inputs, turned), output


def read_gates(parameters: Parameters, prefix: str, mixer: MixerConfig) -> tuple[Weight, Weight] | None:
    """Return the second products to gates and decays, if they have two; see `LayerWeights.mixer_gates`."""
    gates = [parameters.tensor(prefix, tensor) for tensor in mixer_gates(mixer)]
    return (gates[0], gates[1]) if gates else None


def _taps(parameters: Parameters, at: str, mixer: MixerConfig) -> tuple[mx.array, mx.array | None]:
    """Return the weight (width, C) of the convolution, and its bias, if any."""
    sizes = mixer.sizes
    if not mixer.apart:
        return parameters.taps(f"{at}.conv1d", sizes.channels, sizes.width)
    keys = sizes.key_heads * sizes.key_dim
    channels = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": sizes.inner}
    taps = [parameters.taps(f"{at}.{name}", count, sizes.width) for name, count in channels.items()]
    return mx.concatenate([weight for weight, _ in taps], axis=1), None


def _norm(parameters: Parameters, name: str, mixer: MixerConfig) -> mx.array | None:
    if not mixer.norm_parts:
        return None
    weight = parameters.vector(name, mixer.sizes.inner)
    return weight if mixer.norm_parts == 1 else weight.reshape(mixer.norm_parts, -1)


def _as_queries(sizes: MixerSizes) -> mx.array:
    """Return the stored channel of each of [C, B, x], which are queries, keys and values; stored are [x, B, C]."""
    keys = sizes.key_heads * sizes.key_dim
    inner = sizes.inner
    return mx.concatenate([mx.arange(inner + keys, inner + 2 * keys), mx.arange(inner, inner + keys), mx.arange(inner)])


def _by_key_head(sizes: MixerSizes) -> mx.array:
    """Return the stored row of each of [q, k, v | z | b | a]; stored are q, k, v, z of each key head, then b, a."""
    key = sizes.key_dim
    value = sizes.inner // sizes.key_heads
    wide = mx.arange(sizes.channels + sizes.inner).reshape(sizes.key_heads, -1)
    narrow = wide.size + mx.arange(2 * sizes.heads).reshape(sizes.key_heads, -1)
    parts = [*mx.split(wide, [key, 2 * key, 2 * key + value], axis=1), *mx.split(narrow, 2, axis=1)]
    return mx.concatenate([part.flatten() for part in parts])
