"""Weights of layers with several states: Mamba's scan after its convolution, and RWKV-7.

`layers` calls the functions here. Sizes and names are those of `network.tensors`; `decoder` and `rwkv_decoder` run the
layers. E = width, C = channels of a convolution, H = heads of an RWKV-7 layer, D = their size.
tests/parity/test_mlx_lm_families.py compares logits.
"""

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, MixerConfig, TimeMixConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import CHANNEL_MIX, TIME_MIXES, low_rank_names, scan_products, time_mix
from headrace.runtime.ops import LayerWeights, MixerSpec, ScanWeights, TimeMixWeights, Weight, WkvVectors

_HEAD_EPS = 64e-5  # of the norm of each head's result in RWKV-7, whatever `norm_eps`


def with_scan(weights: LayerWeights, parameters: Parameters, prefix: str, mixer: MixerConfig) -> LayerWeights:
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


def with_time_mix(
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
