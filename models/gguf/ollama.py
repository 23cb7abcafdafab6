"""Gemma 3 as Ollama converts it, in the names and with the values of llama.cpp's converter.

Ollama's own converter writes other keys than llama.cpp's, leaves out values that its program has built in, and puts the
vision tower into the same file. `container` passes every file through here, so that nothing else knows of them.

Facts are from Ollama's convert/convert_gemma3.go and model/models/gemma3/model_text.go, and from the config.json of the
models. Guard: tests/models/gguf/test_ollama.py.
"""

from collections.abc import Mapping
from typing import TypeVar

from headrace.models.gguf.header import Value

_Tensor = TypeVar("_Tensor")

_ARCHITECTURE = "gemma3"
# Keys of Ollama's converter alone; a file of llama.cpp's has its vision tower apart.
_OWN_KEYS = ("rope.global.freq_base", "rope.local.freq_base", "vision.block_count")
_RENAMED = {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"}
_VISION = ("v.", "mm.")  # prefixes of tensors
# Values of Gemma 3 that files may leave out
_DEFAULTS: dict[str, Value] = {
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.rope.freq_base": 1_000_000.0,
    "gemma3.rope.freq_base_swa": 10_000.0,
    "tokenizer.ggml.add_space_prefix": False,
}
# Layers of 4B, 12B and 27B. Their layers without a window divide positions by 8, which early files do not say.
_STRETCHED = (34, 48, 62)
_STRETCH: dict[str, Value] = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
_LAYERS_OF_1B = 26  # its early files limit the logits to 30, as Gemma 2 does; Gemma 3 has no limit


def as_llama_cpp(
    metadata: Mapping[str, Value], tensors: Mapping[str, _Tensor]
) -> tuple[Mapping[str, Value], Mapping[str, _Tensor]]:
    """Return the metadata and tensors of a text model as llama.cpp would write them; other files as they are."""
    if metadata.get("general.architecture") != _ARCHITECTURE:
        return metadata, tensors
    if not any(f"{_ARCHITECTURE}.{key}" in metadata for key in _OWN_KEYS):
        return metadata, tensors

    new_names = {f"{_ARCHITECTURE}.{old}": f"{_ARCHITECTURE}.{new}" for old, new in _RENAMED.items()}
    renamed = {new_names.get(key, key): value for key, value in metadata.items()}
    layers = renamed.get("gemma3.block_count")
    if layers in _STRETCHED and renamed.get("gemma3.rope.scaling.factor", 1.0) == 1.0:
        renamed |= _STRETCH
    if layers == _LAYERS_OF_1B:
        renamed.pop("gemma3.final_logit_softcapping", None)
    text_tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_VISION)}
    return _DEFAULTS | renamed, text_tensors
