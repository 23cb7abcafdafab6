"""Reading JSON objects from untrusted files that accompany the weights.

Files that decide what is loaded go through `models.checkpoint.safetensors`, which is stricter.

Guard: tests/faults/test_side_files.py.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.models.checkpoint.side_file import check_parts, parse_json, read_side_file
from headrace.runtime.errors import CheckpointError

_MAX_BYTES = 32 << 20  # of a file
MAX_PARTS = 800_000  # a shard header with a hundred thousand tensors has 700,000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # an escape or bytes, alone or in a pair


def unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object's pairs as a mapping. Raises ValueError for a repeated key: parsers differ in its value."""
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"the key {quote(key)} appears twice")
        unique[key] = value
    return unique


def check_unicode(content: bytes, value: object) -> None:
    """Raise UnicodeEncodeError, a ValueError, if a string in `value`, parsed from `content`, has a lone surrogate."""
    if _SURROGATE.search(content):
        json.dumps(value, ensure_ascii=False).encode()


def read_json_object(file: Path) -> dict[str, object]:
    """Return the object in `file`, without lone surrogates.

    Raises CheckpointError for a file that is unreadable, too large or not a JSON object.
    """
    try:
        content = read_side_file(file, _MAX_BYTES)
        check_parts(content, MAX_PARTS)
        value = parse_json(content)
        check_unicode(content, value)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.name} is not a JSON object")
    return value


def is_deep(value: object, max_levels: int) -> bool:
    """Return whether a JSON value has more levels of objects and lists. It may have more than functions may call."""
    level: list[Any] = [value]
    for _ in range(max_levels):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def without_nulls(values: Mapping[str, object]) -> dict[str, object]:
    """Return an object's values but null."""
    return {key: value for key, value in values.items() if value is not None}


def quote(value: object) -> str:
    """Return `value` from a hostile file, short and printable."""
    text = ascii(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return text
