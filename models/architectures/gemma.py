"""Layers of Gemma 4 in a config.json: two head sizes, K/V of earlier layers, rotation of a part, experts as a branch.

Missing keys have the defaults of mlx-lm's class.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import LayerConfig, RopeConfig
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def gemma4_layers(fields: Fields, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return the layers with their sizes and the sources of their K/V. Raises CheckpointError where there is none."""
    values = fields.values
    count = len(layers)
    if values.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError("config.json: a Gemma 4 that attends in both directions does not generate")
    if values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise UnsupportedModelError(f"config.json: a Gemma 4 with the activation {values['hidden_activation']!r:.60}")
    first = count - (0 if values.get("num_kv_shared_layers") == 0 else fields.count("num_kv_shared_layers", default=20))
    inner = fields.count("intermediate_size")
    wide = values.get("use_double_wide_mlp", True)
    full = fields.count("global_head_dim", default=512)
    usual = fields.count("head_dim", default=256)
    kv_heads = fields.count("num_key_value_heads", default=1)
    equal = bool(values.get("attention_k_eq_v"))
    full_kv_heads = fields.count("num_global_key_value_heads", default=kv_heads) if equal else kv_heads
    sized: list[LayerConfig] = []
    newest: dict[bool, int] = {}  # sliding: the last layer with K/V of its own
    for number, layer in enumerate(layers):
        slides = layer.window is not None
        shares = number >= first > 0
        if shares and slides not in newest:
            raise CheckpointError(f"config.json: no layer before {first} has K/V for layer {number}")
        if not shares:
            newest[slides] = number
        sized.append(
            replace(
                layer,
                kv_heads=kv_heads if slides else full_kv_heads,
                head_dim=usual if slides else full,
                source=newest[slides] if shares else None,
                inner=inner * 2 if shares and wide else inner,
                projects="q" if shares else "qk" if equal and not slides else "qkv",
            )
        )
    return tuple(sized)


def gemma4_inputs(fields: Fields) -> tuple[int, int]:
    """Return the size of each layer's own input and the rows of its table; (0, 0) without."""
    size = fields.values.get("hidden_size_per_layer_input", 256)
    if not size:
        return 0, 0
    rows = fields.count("vocab_size_per_layer_input", default=262144)
    vocabulary = fields.count("vocab_size")
    if rows < vocabulary:
        raise CheckpointError(f"config.json: {rows} inputs of single layers are too few for {vocabulary} tokens")
    return fields.count("hidden_size_per_layer_input", default=256), rows


def gemma4_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Return (rotation of full-attention layers, rotation of sliding layers)."""
    sections = Fields(fields.section("rope_parameters"))
    if not sections.values:
        return RopeConfig(1e6, "proportional", None, 0.25), RopeConfig(1e4)
    full, sliding = (_rope(Fields(sections.section(kind))) for kind in (_FULL, _SLIDING))
    return full, sliding


def _rope(section: Fields) -> RopeConfig:
    kind = str(section.values.get("type") or section.values.get("rope_type") or "default")
    share = section.positive("partial_rotary_factor", default=1.0)
    return RopeConfig(section.positive("rope_theta", default=1e4), kind, section.values, share)
