"""Muse Glimmer: gates of heads, norms of queries and keys without weights, positions in layers with a window alone.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guards: tests/parity/test_mlx_lm_families.py by logits, and tests/models/architectures/test_muse.py.
"""

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.config import DecoderConfig, Family
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.gemma import AROUND
from headrace.models.architectures.layers import sliding_layers

_PERIOD = 4  # every fourth layer has no window
# Defaults of transformers' class, which multimodal configs omit from the section of their text part
_DEFAULTS = {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048,
    "max_position_embeddings": 131072,
}  # fmt: skip


def _turns(fields: Fields, layers: int) -> list[bool]:
    """Return for each layer whether it rotates: those with a `layer_rope_theta`, without that those with a window."""
    stated = fields.listed("layer_rope_theta", layers)
    if stated is None:
        return sliding_layers(fields, _MUSE, layers)
    return [bool(theta) for theta in stated]


def _runs(fields: Fields) -> bool:
    """Return False if mlx-lm and transformers would rotate different layers.

    Both follow `layer_rope_theta`. Without it, transformers' class counts the period from the last layer backwards, so
    that layer always has full attention.
    """
    if fields.values.get("layer_rope_theta") is not None:
        return True
    layers = fields.count("num_hidden_layers")
    return _turns(fields, layers) == [(layers - 1 - i) % _PERIOD != 0 for i in range(layers)]


def _complete(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Add the factors.

    Norms after attention and feed-forward have an epsilon of their own. All norms have it if the residual stream is
    stored divided by the root of the epsilons' ratio.
    """
    # All defaults here are those of transformers' class. norm(x / d) with eps / d^2 is norm(x) with eps.
    branch_eps = fields.positive("post_norm_eps", default=1e-8)
    divisor = (decoder.norm_eps / branch_eps) ** 0.5
    turns = _turns(fields, len(decoder.layers))
    rope = decoder.layers[0].rope
    return replace(
        decoder,
        attention_scale=decoder.attention_scale * fields.positive("qk_scale_factor", default=3.87),
        norm_eps=branch_eps,
        head_eps=decoder.norm_eps,
        embedding_eps=decoder.norm_eps,
        embedding_scale=1 / divisor,
        branch_scale=1 / divisor,
        logit_scale=fields.positive("output_multiplier", default=0.19611613513818404),
        logit_softcap=fields.positive("final_logit_softcapping", default=20.0),
        norm_weight_offset=1.0,
        layers=tuple(
            replace(layer, rope=rope if is_turned else None)
            for layer, is_turned in zip(decoder.layers, turns, strict=True)
        ),
    )


_MUSE = Architecture(
    "muse_glimmer",
    Family(AROUND, qk_norm="unit", norm_last=True, gates="apart", last_norm_whole=True),
    defaults={"sliding_window": 2048},
    nests=True,
    activation_key="hidden_activation",
    theta=5e5,
    sliding="period",
    period=_PERIOD,
    biases={},
    runs=_runs,
    complete=_complete,
)

ROWS = (_MUSE, Architecture("muse_glimmer_text", layers_of="muse_glimmer", nested_defaults=_DEFAULTS))
