"""Reading a JSON object from a file that anybody may have written: one error for whatever is wrong with it.

For what accompanies the weights. What decides what is loaded goes through `models.checkpoint.safetensors`, which is
stricter.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.models.checkpoint.side_file import check_parts, read_side_file
from headrace.runtime.errors import CheckpointError

_MAX_BYTES = 32 << 20
MAX_PARTS = 800_000  # the headers of a hundred thousand tensors in one shard have 700,000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # as an escape or as bytes, alone or one of a pair


def repeated_key(pairs: Iterable[tuple[str, Any]]) -> str | None:
    """The first key that comes a second time: JSON allows it, and readers differ in which value they take."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def check_unicode(content: bytes, value: Any) -> None:
    """Raises UnicodeEncodeError, a ValueError, if a text in `value`, read from `content`, has a lone surrogate."""
    if _SURROGATE.search(content):
        json.dumps(value, ensure_ascii=False).encode()


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises CheckpointError if it cannot be read, is absurdly large or is no JSON object.

    No text in it has a lone surrogate, which JSON can write and no library for text takes.
    """
    try:
        content = read_side_file(file, _MAX_BYTES)
        check_parts(content, MAX_PARTS)
        value = json.loads(content)
        check_unicode(content, value)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.name} is not a JSON object")
    return value
