"""Text part of Mllama (Llama 3.2 Vision): a Llama, between layers that attend to images and are skipped without one.

`architecture.Architecture` explains the fields of a row, and the order in which its functions are called.
Guard: tests/models/architectures/test_mllama.py.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.config import DecoderConfig, Family
from headrace.models.architectures.fields import Fields
from headrace.runtime.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx

_TEXT = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")  # the beginning of "model.layers.3.mlp.up_proj.weight"


def _image_layers(config: Mapping[str, Any]) -> set[int]:
    """Return the layers that attend to images. Raises CheckpointError if the config lists none."""
    layers = config.get("cross_attention_layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(f"config.json: cross_attention_layers must list layers, not {layers!r:.60}")
    return set(layers)


def _is_of_images(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether this tensor is of a layer that attends to images."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) in _image_layers(config)


def _numbered(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a tensor or module with the number that its layer has among those of text."""
    match = _LAYER.match(f"{name}.")
    if match is None:
        return name
    stored = int(match[1])
    rest = name[len(match[0]) - 1 :]
    of_images = _image_layers(config)
    if stored in of_images:  # a module of such a layer may have quantization settings, which are of no layer here
        return f"model.image_layers.{stored}{rest}"
    before = sum(layer < stored for layer in of_images)
    return f"model.layers.{stored - before}{rest}"


def _text_layers(fields: Fields, decoder: DecoderConfig) -> DecoderConfig:
    """Leave out the layers that attend to images."""
    of_images = _image_layers(fields.values)
    layers = tuple(layer for index, layer in enumerate(decoder.layers) if index not in of_images)
    if not layers:
        raise CheckpointError("config.json: cross_attention_layers leaves no layer for text")
    return replace(decoder, layers=layers)


def _text_rows(arrays: "dict[str, mx.array]", fields: Fields) -> "dict[str, mx.array]":
    """Return the arrays with the table's rows of text alone: eight more are of images."""
    count = fields.count("vocab_size")
    return {name: array[:count] if name.startswith("model.embed_tokens.") else array for name, array in arrays.items()}


ROWS = (
    Architecture("mllama", nests=True),
    Architecture(
        "mllama_text_model",
        Family(),
        nested_defaults=_TEXT,
        outer=lambda _config: "mllama",  # layers of a text-only checkpoint have the same numbers
        rename=_numbered,
        is_unread=_is_of_images,
        turn=_text_rows,
        theta=5e5,
        complete=_text_layers,
        biases={},
    ),
)
