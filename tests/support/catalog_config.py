"""The config of a model of the catalog: those entries of its config.json that a figure follows from.

    python -m tests.support.catalog_config NAME CONFIG.JSON

writes it into assets/configs.json.
"""

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.models.cost.shape_sources import shape_of_config
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import HeadraceError

FILE = ASSETS / "configs.json"
# Entries that stay, so that a reader recognizes the model.
NAMED = {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
_FOUR_BITS = {"quantization": {"bits": 4, "group_size": 64}}


def figures(config: Mapping[str, Any]) -> object:
    """Return all figures of a config, plain and in 4 bits; None if it is incomplete."""
    try:
        return shape_of_config(config), shape_of_config({**config, **_FOUR_BITS})
    except HeadraceError:
        return None


def reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the entries that no figure follows from, and without the format of its weights."""
    kept = json.loads(json.dumps(config))
    for part in (kept, kept.get("text_config", {})):
        for key in ("quantization", "quantization_config"):
            part.pop(key, None)
    given = figures(kept)
    assert given is not None
    for part, key in entries(kept):
        value = part.pop(key)
        if figures(kept) != given:
            part[key] = value
    assert figures(kept) == given
    return kept


def entries(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return each entry that may be left out, inner ones after their section, as (section, key)."""
    found = []
    for key, value in config.items():
        if key not in NAMED:
            found.append((config, key))
        if isinstance(value, dict):
            found += entries(value)
    return found


def write(configs: Mapping[str, Any]) -> None:
    """Write the file, in lines that fit the screen."""
    blocks = []
    for name, config in configs.items():
        text = json.dumps({name: config})[1:-1]
        blocks.append(textwrap.fill(text, 119, break_long_words=False, break_on_hyphens=False))
    FILE.write_text("{\n" + ",\n\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    name, source = sys.argv[1:]
    write(json.loads(FILE.read_bytes()) | {name: reduced(json.loads(Path(source).read_bytes()))})
