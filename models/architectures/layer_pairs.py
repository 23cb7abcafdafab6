"""Names of tensors that depend on the kind of their layer: Nemotron-H and Kimi Linear.

Layers of Nemotron-H are stored as blocks: Mamba-2, attention, a feed-forward or experts, each with a norm.

A layer of the decoder is a block that mixes tokens, and the feed-forward behind it, if there is one. Blocks have
letters: M Mamba-2, * attention, - a feed-forward, E experts.
"""

import re
from collections.abc import Mapping
from typing import Any

from headrace.runtime.errors import CheckpointError

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(norm|mixer)\b")
_ATTENTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.")
_KDA = ((".o_proj", ".out_proj"), (".o_norm", ".norm"), ("_conv.conv", "_conv1d"))
_STACKS = ((".switch_mlp.fc1", ".switch_mlp.up_proj"), (".switch_mlp.fc2", ".switch_mlp.down_proj"))


def layer_pairs(config: Mapping[str, Any]) -> list[str]:
    """Return the letters of each layer, such as "M-", "M" or "*E"; "-" or "E" alone for one that mixes nothing.

    Raises CheckpointError for unknown blocks.
    """
    listed = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types")
    if not isinstance(listed, list | str) or not all(isinstance(kind, str) for kind in listed):
        raise CheckpointError("config.json: hybrid_override_pattern must list the layers")
    pattern = "".join(_LETTERS.get(kind, kind) for kind in listed)
    if not pattern or pattern.strip("M*-E"):
        raise CheckpointError(f"config.json: hybrid_override_pattern has unknown layers: {pattern!r:.60}")
    return re.findall(r"[M*]?[-E]|[M*]", pattern)


def kda_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers of Kimi Linear with a delta network, from 0."""
    section = config.get("linear_attn_config")
    listed = section.get("kda_layers") if isinstance(section, Mapping) else None
    if not isinstance(listed, list) or not all(isinstance(number, int) for number in listed):
        raise CheckpointError("config.json: linear_attn_config must list kda_layers")
    return frozenset(number - 1 for number in listed)


def named_by_layer(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a tensor or module by its layer: `mixer`, `self_attn`, `mlp`, and norms."""
    if config.get("model_type") == "kimi_linear":
        found = _ATTENTION.match(name)
        if found is None or int(found[1]) not in kda_layers(config):
            return name
        name = f"model.layers.{found[1]}.mixer.{name[found.end() :]}"
        for theirs, ours in _KDA:
            name = name.replace(theirs, ours)
        return name
    places = [(number, letter) for number, letters in enumerate(layer_pairs(config)) for letter in letters]

    def renamed(found: re.Match[str]) -> str:
        number, letter = places[block] if (block := int(found[1])) < len(places) else (block, "M")
        mixes = letter in "M*"
        norm = "input_layernorm" if mixes else "post_attention_layernorm"
        part = norm if found[2] == "norm" else {"M": "mixer", "*": "self_attn"}.get(letter, "mlp")
        return f"model.layers.{number}.{part}"

    name = _BLOCK.sub(renamed, name)
    for theirs, ours in _STACKS:
        name = name.replace(theirs, ours)
    return name
