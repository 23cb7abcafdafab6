"""Weights of layers with recurrent state: projections in the order of `runtime.ops.MixerSpec`, and small vectors."""

import mlx.core as mx

from headrace.models.network.config import DecoderConfig
from headrace.models.network.mixer_config import MixerConfig, projections_into
from headrace.models.network.parameters import Parameters
from headrace.runtime.ops import MixerSpec, Weight


def read_mixer(
    config: DecoderConfig, parameters: Parameters, prefix: str, mixer: MixerConfig
) -> tuple[MixerSpec, list[Weight], Weight]:
    """Return a layer's mixer, the projections into it, and the one out of it."""
    width, at = config.hidden_size, f"{prefix}.mixer"
    output = parameters.matrix(f"{at}.out_proj", width, mixer.inner)
    sizes = (mixer.kind, mixer.heads, mixer.key_heads, mixer.key_dim, mixer.value_dim)
    stored = [(f"{at}.{name}", rows) for name, rows in projections_into(mixer).items()]
    taps, bias = parameters.taps(f"{at}.conv1d", mixer.channels, mixer.width)
    if mixer.kind == "conv":
        spec = MixerSpec(*sizes, taps=taps, tap_bias=bias)
        return spec, parameters.fused(stored, width, f"{at}.in_proj"), output
    rate = -mx.exp(parameters.vector(f"{at}.A_log", mixer.heads).astype(mx.float32))
    step_bias = parameters.vector(f"{at}.dt_bias", mixer.heads)
    if mixer.kind == "delta":
        norm = parameters.vector(f"{at}.norm.weight", mixer.value_dim)
        spec = MixerSpec(*sizes, taps, bias, rate, step_bias, norm=norm, norm_eps=mixer.eps)
        return spec, parameters.fused(stored, width, f"{at}.in_proj"), output
    order = _as_queries(mixer)
    spec = MixerSpec(
        *sizes,
        taps=taps[:, order],
        tap_bias=None if bias is None else bias[order],
        rate=rate,
        step_bias=step_bias,
        steps=mixer.steps,
        skip=parameters.vector(f"{at}.D", mixer.heads),
        norm=parameters.vector(f"{at}.norm.weight", mixer.inner),
        norm_first=False,
        norm_eps=mixer.eps,
    )
    [(_, rows)] = stored
    turned = mx.concatenate([mixer.inner + order, mx.arange(mixer.inner), mx.arange(rows - mixer.heads, rows)])
    return spec, parameters.fused(stored, width, f"{at}.in_proj", turned), output


def _as_queries(mixer: MixerConfig) -> mx.array:
    """Return the stored channel of each of [C, B, x], which are queries, keys and values; stored are [x, B, C]."""
    keys, inner = mixer.key_heads * mixer.key_dim, mixer.inner
    return mx.concatenate([mx.arange(inner + keys, inner + 2 * keys), mx.arange(inner, inner + keys), mx.arange(inner)])
