"""Table of the convertible GGUF architectures, a file for each kind of layers.

blocks      tensors that many share
dense, layer_norms, uneven_layers, mixtures, gemma, delta, lfm2, mamba, rwkv      rows
"""

from headrace.models.gguf.architecture import GGUFArchitecture
from headrace.models.gguf.architectures import (
    delta,
    dense,
    gemma,
    layer_norms,
    lfm2,
    mamba,
    mixtures,
    rwkv,
    uneven_layers,
)
from headrace.models.gguf.keys import has_experts
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import UnsupportedModelError

_FILES = (dense, layer_norms, uneven_layers, mixtures, gemma, delta, lfm2, mamba, rwkv)
ARCHITECTURES: dict[str, GGUFArchitecture] = {name: row for file in _FILES for name, row in file.ROWS.items()}

# Reasons why a known architecture has no row
_BEST_SCORES = "its tokenizer chooses the tokens with the best sum of scores, which no tokenizer here does"
_MISSING = {
    "bitnet": "its file does not state its activation, which is SiLU or squared ReLU",
    "plamo": "its heads have another order than in the class that runs its safetensors",
    **dict.fromkeys(("plamo2", "plamo3"), _BEST_SCORES),
    "deepseek4": "its compressed attention and hyper-connections have no row here; its safetensors run",
    "talkie": "its file states the factors of heads in another form than the class that runs its safetensors",
}


def architecture_of(metadata: Metadata) -> GGUFArchitecture:
    """Return the row of a file's architecture. Raises UnsupportedModelError for an unknown one."""
    name = metadata.architecture
    if name not in ARCHITECTURES:
        reason = f": {_MISSING[name]}" if name in _MISSING else ""
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported{reason}",
            hint="look for an MLX or safetensors version; docs/models.md lists the GGUF architectures that run",
        )
    if name == "llama" and has_experts(metadata):  # Mixtral's files have Llama's name
        return mixtures.MIXTRAL
    return ARCHITECTURES[name]
