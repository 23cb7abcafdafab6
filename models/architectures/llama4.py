"""Layers of Llama 4 in a config.json: attention in chunks, and queries of layers without rotation that grow.

Missing keys have transformers' defaults.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.models.architectures.fields import Fields
from headrace.models.architectures.layers import LayerConfig

_LENGTH = 8192


def llama4_layers(fields: Fields, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return the layers with their chunks and the growth of their queries."""
    values = fields.values
    kinds = fields.values.get("layer_types")
    chunk = fields.count("attention_chunk_size", default=_LENGTH) if values.get("attention_chunk_size", _LENGTH) else 0
    growth = None
    if values.get("attn_temperature_tuning", True):
        growth = fields.positive("attn_scale", default=0.1), fields.count("floor_scale", default=_LENGTH), 1
    return tuple(
        replace(
            layer,
            window=chunk if chunk and cut else None,
            chunked=bool(chunk and cut),
            growth=growth if layer.rope is None else None,
        )
        for number, layer in enumerate(layers)
        for cut in [layer.rope is not None if kinds is None else kinds[number] == "chunked_attention"]
    )


def query_growth(fields: Fields) -> tuple[float, int, int] | None:
    """Return the growth of Ministral 3's queries, in all layers; None for other architectures."""
    if fields.values["model_type"] != "ministral3":
        return None
    section = Fields(fields.section("rope_parameters"))
    beta = section.values.get("llama_4_scaling_beta")
    length = section.count("original_max_position_embeddings")
    return (section.positive("llama_4_scaling_beta"), length, 0) if beta else None
