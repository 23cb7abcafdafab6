"""Table of all architectures by model_type.

A new file with rows is added to the imports and to `_FILES`. Rows of a model_type stand in one file only.

Guard: tests/models/architectures/test_published_names.py.
"""

from collections.abc import Mapping

from headrace.models.architectures import (
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    granite,
    grok,
    hunyuan,
    kimi,
    layer_norms,
    lfm2,
    ling,
    llama,
    mamba,
    mimo,
    minimax,
    mllama,
    muse,
    nemotron,
    olmo,
    openelm,
    others,
    qwen,
    rwkv,
    step,
)
from headrace.models.architectures.architecture import Architecture

_FILES = (
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    granite,
    grok,
    hunyuan,
    kimi,
    layer_norms,
    lfm2,
    ling,
    llama,
    mamba,
    mimo,
    minimax,
    mllama,
    muse,
    nemotron,
    olmo,
    openelm,
    others,
    qwen,
    rwkv,
    step,
)
ARCHITECTURES = {row.name: row for file in _FILES for row in file.ROWS}
_UNKNOWN = Architecture("")


def architecture_of(config: Mapping[str, object]) -> Architecture:
    """Return the row of a config's model_type; a row without facts for an unknown one."""
    return architecture_named(config.get("model_type"))


def architecture_named(model_type: object) -> Architecture:
    """Return the row of a model_type; a row without facts for an unknown one."""
    return ARCHITECTURES.get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN
