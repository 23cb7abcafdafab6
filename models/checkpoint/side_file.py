"""Reading of small untrusted files that accompany the weights, mostly JSON.

Only regular files up to a size limit are read: a path can name a pipe, an endless device or a huge sparse file. A link
must not lead out of the model's directory. Headers of weights go through `shard_header`, which is stricter.

Guards: tests/faults/test_side_files.py and tests/models/checkpoint/test_safetensors.py.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.runtime.config.files import read_regular
from headrace.runtime.errors import CheckpointError

_MAX_BYTES = 32 << 20  # of a JSON object
MAX_PARTS = 800_000  # a shard header with a hundred thousand tensors has 700,000
MAX_TOKENIZER_BYTES = 64 << 20  # the largest tokenizer.json files in use have 35 MB
MAX_TOKENIZER_PARTS = 4_000_000  # and 2 million values
# A string of JSON. Without an end it goes on to that of the text: a search from each of its quotes would take hours.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # an escape or bytes, alone or in a pair


def check_name(path: Path) -> None:
    """Raise CheckpointError for a path that is no Unicode: MLX cannot open it, and no JSON or database can name it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{str(path)!a}: the name is not UTF-8", "rename the file or folder") from None


def check_inside(root: Path, file: Path) -> None:
    """Raise CheckpointError for a file in `root` that is a link out of it; OSError for a loop of links.

    Exception: links below the hub cache's models--org--name/snapshots/<commit>/ may lead to that model's blobs/ and to
    the cache's shared blobs/.
    """
    root = Path(os.path.realpath(root))
    target = Path(os.path.realpath(file))
    allowed = [root]
    for snapshot in (root, *root.parents):  # a model may be in a folder of a repository
        cache = snapshot.parents
        if len(cache) > 2 and cache[0].name == "snapshots" and cache[1].name.startswith("models--"):
            allowed += [cache[1] / "blobs", cache[2] / "blobs"]
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise CheckpointError(f"{file.name} is a link out of the model directory")


def has_side_file(file: Path) -> bool:
    """Return whether a model's directory has this name. `read_side_file` refuses a folder, a pipe or a broken link.

    A hub cache whose blobs were deleted has broken links. Without their files a model would behave in another way.
    """
    return os.path.lexists(file)


def read_side_file(file: Path, max_bytes: int, root: Path | None = None) -> bytes:
    """Return the content of `file` in the model's directory, `root` or the file's own.

    Raises CheckpointError for a link out of it, OSError, or ValueError unless it is a regular file up to `max_bytes`.
    """
    check_inside(root or file.parent, file)
    return read_regular(file, max_bytes)


def check_parts(content: bytes, max_parts: int) -> None:
    """Raise ValueError for JSON in UTF-8 of more than `max_parts` values, before a parser creates objects for them.

    Commas and opening brackets are counted, which bound the values: first all of them, which is fast, then those
    outside of strings.
    """
    if _count_parts(content) > max_parts and _count_parts(_STRING.sub(b"", content)) > max_parts:
        raise ValueError(f"it has more than {max_parts} values")


def parse_json(content: bytes) -> Any:
    """Return the value of JSON in UTF-8. `json.loads` takes UTF-16 and UTF-32, too, whose values nobody has counted."""
    return json.loads(content.decode("utf-8-sig", "surrogatepass"))


def _count_parts(content: bytes) -> int:
    return sum(map(content.count, (b",", b"[", b"{")))


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
