"""Weights of a layer's recurrent mixing, from a checkpoint's parameters: convolutions, delta networks, Mamba, RWKV-7.

`layers` calls `with_mixer`. A checkpoint's rows are put into the order of `runtime.ops.mixers.MixerSizes`; a row in
another order changes the logits, which tests/parity/test_mlx_lm_families.py compares. Names and sizes of the tensors
are those of `network.tensors`. `layers` explains the parameters of all functions.

Dimensions: C channels of the convolution, Hv heads, Dv size of a head's values. In RWKV-7, H heads of size D; E width.
"""

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, LayerConfig, MixerConfig, TimeMixConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import (
    CHANNEL_MIX,
    TIME_MIXES,
    low_rank_names,
    mixer_gates,
    mixer_inputs,
    mixer_output,
    scan_products,
    time_mix,
)
from headrace.runtime.ops import LayerWeights, MixerSizes, MixerSpec, ScanWeights, TimeMixWeights, Weight, WkvVectors

_HEAD_EPS = 64e-5  # of the norm of each head's result in RWKV-7, whatever `norm_eps`


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
        return _with_time_mix(weights, config, parameters, prefix, mixer)
    if mixer.scan is not None:
        weights = _with_scan(weights, parameters, prefix, mixer)
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


# -- layers with several states: Mamba, RWKV-7 ----------------------------------------------------------------------


def _with_scan(weights: LayerWeights, parameters: Parameters, prefix: str, mixer: MixerConfig) -> LayerWeights:
    """Add the scan of a Mamba layer and the products before it."""
    assert mixer.scan is not None
    [sizes] = mixer.later
    stored = parameters.table(f"{prefix}.mixer.A_log", sizes.heads, sizes.key_dim)
    spec = MixerSpec(
        sizes,
        rate=-mx.exp(stored.astype(mx.float32)),  # (C, N)
        skip=parameters.vector(f"{prefix}.mixer.D", sizes.heads),
    )
    into, step = (parameters.tensor(prefix, tensor) for tensor in scan_products(mixer))
    norms = None
    if mixer.scan.norm_eps is not None:
        norms = tuple(parameters.ones(size) for size in (mixer.scan.rank, sizes.key_dim, sizes.key_dim))
    return replace(weights, later_mixers=(spec,), scan=ScanWeights(into, step, norms, mixer.scan.norm_eps or 0.0))


def _with_time_mix(
    weights: LayerWeights, config: DecoderConfig, parameters: Parameters, prefix: str, mixer: MixerConfig
) -> LayerWeights:
    """Add the first half of an RWKV-7 layer, and the states of both."""
    sizes = mixer.time_mix
    assert sizes is not None
    width = config.hidden_size
    recurrence, channel_sizes = mixer.later
    *projections, output = time_mix(config, sizes)[:4]
    receptance, key, value = (parameters.tensor(prefix, tensor) for tensor in projections)

    def of_channels(name: str) -> mx.array:
        return parameters.vector(f"{prefix}.{name}", width)

    def of_heads(name: str) -> mx.array:
        return of_channels(f"attn.{name}").reshape(recurrence.heads, recurrence.key_dim)

    heads = WkvVectors(
        removed_key=of_heads("k_k"),
        key_rate=of_heads("k_a"),
        bonus=of_heads("r_k"),
        norm=of_heads("g_norm.weight"),
        norm_bias=of_heads("g_norm.bias"),
    )
    low_rank = _low_rank(parameters, prefix, width, sizes)
    shares = mx.stack([of_channels(f"attn.x_{letter}") for letter in TIME_MIXES])  # (6, E)
    recurrence_spec = MixerSpec(recurrence, norm_eps=_HEAD_EPS, wkv=heads, mixes_values="v" in low_rank)
    channel_shift = MixerSpec(channel_sizes, taps=of_channels(CHANNEL_MIX)[None])
    return replace(
        weights,
        mixer=MixerSpec(mixer.sizes, taps=shares),
        later_mixers=(recurrence_spec, channel_shift),
        output=parameters.tensor(prefix, output),
        time_mix=TimeMixWeights(
            receptance=receptance,
            key=key,
            value=value,
            decay=low_rank["w"],
            rate=low_rank["a"],
            value_mix=low_rank.get("v"),
            gate=low_rank["g"],
        ),
    )


def _low_rank(
    parameters: Parameters, prefix: str, width: int, sizes: TimeMixConfig
) -> dict[str, tuple[Weight, Weight]]:
    """Return the pairs of products by the letters of their names."""
    pairs = {}
    for letter, rank in sizes.ranks.items():
        first, second = low_rank_names(letter)
        into = parameters.matrix(f"{prefix}.{first}", rank, width)
        out = parameters.matrix(f"{prefix}.{second}", width, rank)
        pairs[letter] = into, out
    return pairs
