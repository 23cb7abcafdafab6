"""Weights of a layer's recurrent mixing, read from a checkpoint's parameters: delta networks, Mamba-2, convolutions.

`layers` calls `with_mixer`. A checkpoint's rows are put into the order of `runtime.ops.mixers.MixerSizes`; a row in
another order changes the logits, which tests/parity/test_mlx_lm_families.py compares. Layers with several states are in
`recurrent_layers`.

Dimensions: C channels of the convolution, Hv heads, Dv size of a head's values.
"""

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, LayerConfig, MixerConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.recurrent_layers import with_scan, with_time_mix
from headrace.models.network.tensors import mixer_gates, mixer_inputs, mixer_output
from headrace.runtime.ops import LayerWeights, MixerSizes, MixerSpec, Weight


def with_mixer(
    weights: LayerWeights,
    config: DecoderConfig,
    parameters: Parameters,
    prefix: str,
    layer: LayerConfig,
    mixer: MixerConfig,
) -> LayerWeights:
    """Add a mixer. Its projections stand in place of attention's, or as `mixer_ends` next to them."""
    if mixer.time_mix is not None:
        return with_time_mix(weights, config, parameters, prefix, mixer)
    if mixer.scan is not None:
        weights = with_scan(weights, parameters, prefix, mixer)
    spec, inputs, output = _mixer(config, parameters, prefix, mixer)
    weights = replace(weights, mixer=spec, mixer_gates=_gates(parameters, prefix, mixer))
    if not layer.attends:
        return replace(weights, qkv=inputs, output=output)
    [into_mixer] = inputs
    return replace(weights, mixer_ends=(into_mixer, output))


def _mixer(
    config: DecoderConfig, parameters: Parameters, prefix: str, mixer: MixerConfig
) -> tuple[MixerSpec, list[Weight], Weight]:
    """Return a layer's mixer, the projections into it, and the one out of it.

    Rows that a checkpoint has in another order than `MixerSizes` are put into that order: those of Mamba-2, with the
    channels of its convolution, and those that are stored by key head.
    """
    at = f"{prefix}.mixer"
    sizes = mixer.sizes
    inputs = mixer_inputs(config, mixer)
    output = parameters.tensor(prefix, mixer_output(config, mixer))
    taps, bias = _taps(parameters, at, mixer)

    # Short convolution (LFM2, and before the scan of Mamba): no recurrence, rows as stored
    if sizes.kind == "conv":
        scans = mixer.scan is not None
        spec = MixerSpec(sizes, taps=taps, tap_bias=bias, gated=not scans, silu=scans)
        return spec, parameters.fused(prefix, inputs), output
    rate = -mx.exp(parameters.vector(f"{at}.A_log", sizes.heads).astype(mx.float32))
    step_bias = parameters.vector(f"{at}.dt_bias", sizes.decays)

    # Delta networks: rows as stored, or by key head
    if sizes.kind != "ssm":
        norm = parameters.vector(f"{at}.norm.weight", sizes.value_dim)
        spec = MixerSpec(
            sizes,
            taps=taps,
            tap_bias=bias,
            rate=rate,
            step_bias=step_bias,
            bound=mixer.decay_bound,
            most_beta=mixer.most_beta,
            norm=norm,
            norm_eps=mixer.eps,
        )
        stored_order = _by_key_head(sizes) if mixer.by_key_head else None
        return spec, parameters.fused(prefix, inputs, stored_order), output

    # Mamba-2
    order = _as_queries(sizes)
    if bias is not None:
        bias = bias[order]
    spec = MixerSpec(
        sizes,
        taps=taps[:, order],
        tap_bias=bias,
        rate=rate,
        step_bias=step_bias,
        steps=mixer.steps,
        skip=parameters.vector(f"{at}.D", sizes.heads),
        norm=_norm(parameters, f"{at}.norm.weight", mixer),
        norm_first=False,
        norm_eps=mixer.eps,
    )
    # Stored are the rows [z | x, B, C | dt]. Wanted are [C, B, x | z | dt]: `order` counts from x on, after z.
    rows = inputs[0].rows
    turned = mx.concatenate([sizes.inner + order, mx.arange(sizes.inner), mx.arange(rows - sizes.heads, rows)])
    return spec, parameters.fused(prefix, inputs, turned), output


def _gates(parameters: Parameters, prefix: str, mixer: MixerConfig) -> tuple[Weight | None, Weight] | None:
    """Return the second products to gates and decays, if they have two; see `LayerWeights.mixer_gates`."""
    gates = [parameters.tensor(prefix, tensor) for tensor in mixer_gates(mixer)]
    if not gates:
        return None
    if len(gates) == 1:
        return None, gates[0]
    gate, decay = gates
    return gate, decay


def _taps(parameters: Parameters, at: str, mixer: MixerConfig) -> tuple[mx.array, mx.array | None]:
    """Return the weight (width, C) of the convolution, and its bias, if any."""
    sizes = mixer.sizes
    if not mixer.apart:
        return parameters.taps(f"{at}.conv1d", sizes.channels, sizes.width)
    if f"{at}.qkv_conv1d.weight" in parameters:
        return parameters.taps(f"{at}.qkv_conv1d", sizes.channels, sizes.width)
    keys = sizes.key_heads * sizes.key_dim
    channels = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": sizes.inner}
    taps = [parameters.taps(f"{at}.{name}", count, sizes.width) for name, count in channels.items()]
    return mx.concatenate([weight for weight, _ in taps], axis=1), None


def _norm(parameters: Parameters, name: str, mixer: MixerConfig) -> mx.array | None:
    """Return the norm of an "ssm" mixer: (Hv * Dv,), or (parts, Hv * Dv / parts) if parts are normalized alone."""
    if not mixer.norm_parts:
        return None
    weight = parameters.vector(name, mixer.sizes.inner)
    if mixer.norm_parts > 1:
        weight = weight.reshape(mixer.norm_parts, -1)
    return weight


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
    # b and a are a matrix of their own: its rows count on from the first matrix's.
    narrow = wide.size + mx.arange(2 * sizes.heads).reshape(sizes.key_heads, -1)
    parts = [*mx.split(wide, [key, 2 * key, 2 * key + value], axis=1), *mx.split(narrow, 2, axis=1)]
    return mx.concatenate([part.flatten() for part in parts])
