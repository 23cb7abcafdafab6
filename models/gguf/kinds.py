"""GGUF files that are no language model by themselves, by name: adapters, vision parts, embedding models and others.

`gguf.convert` refuses them by these names, before it looks for an architecture.

Guard: tests/models/gguf/test_kinds.py.
"""

from headrace.models.gguf.architectures import architecture_of
from headrace.models.gguf.container import Container
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_NO_LANGUAGE_MODEL = "headrace runs language models that write text from left to right; take another model"
_MODEL_ITSELF = "pass the model that it was made for"

_EMBEDDINGS = (
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
    "gemma-embedding", "gemma-embedding2", "llama-embed",
)  # fmt: skip
# By the value of general.type, or by the architecture
_PARTS = {
    "mmproj": "the vision or audio part of a model",
    "clip": "the vision or audio part of a model",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), "a draft model of another one"),
}
_OTHERS = {
    **dict.fromkeys(_EMBEDDINGS, "an embedding model"),
    **dict.fromkeys(("t5", "t5encoder"), "an encoder-decoder model"),
    **dict.fromkeys(("llada", "llada-moe", "dream", "rnd1"), "a diffusion model of text"),
    **dict.fromkeys(("wavtokenizer-dec", "pockettts", "qwen3tts"), "a speech model"),
    **dict.fromkeys(("flux", "sd1", "sd3", "sdxl", "lumina2", "qwen_image"), "an image model"),
    **dict.fromkeys(("wan", "hyvid", "ltxv", "cosmos"), "a video model"),
}


def check_kind(container: Container) -> None:
    """Raise CheckpointError or UnsupportedModelError for a file that is no language model, or of an unknown family."""
    name = container.paths[0].name
    stated = [container.metadata.get(key) for key in ("general.type", "general.architecture")]
    kinds = [value for value in stated if isinstance(value, str)]
    if "adapter" in kinds:
        raise CheckpointError(f"{name} is an adapter", f"pass it after its base: BASE.gguf+{name}")
    for kind in kinds:
        if kind in _PARTS:
            raise CheckpointError(f"{name} is {_PARTS[kind]}", _MODEL_ITSELF)
        if kind in _OTHERS:
            raise UnsupportedModelError(f"{name} is {_OTHERS[kind]} ({kind})", _NO_LANGUAGE_MODEL)
    metadata = Metadata(container.metadata)
    if not container.tensors:
        architecture = metadata.architecture
        raise CheckpointError(f"{name} has no tensors: it is the vocabulary of a {architecture}", _MODEL_ITSELF)
    architecture_of(metadata)
