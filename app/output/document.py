"""JSON documents that commands print, and Markdown tables.

Guard: tests/app/output/test_document.py.
"""

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]


def typed_command() -> str:
    """Return the command line for a document's `command`, with `\\xHH` for bytes that are not UTF-8."""
    words = (word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for word in sys.argv[1:])
    return shlex.join(["headrace", *words])


def json_text(document: object) -> str:
    """Return the indented JSON text of a struct or plain values.

    Non-ASCII and control characters are escaped: safe for terminals, and the same in any encoding.
    """
    from msgspec import to_builtins  # late: `--help` writes no document

    plain = to_builtins(document)
    try:
        return json.dumps(plain, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(finite(plain), indent=2)


def finite(value: object) -> object:
    """Return plain values with null in place of infinity and NaN, which JSON does not have. Files may state them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return the lines of a table whose first `left` columns are aligned left."""
    rule = ["---" if number < left else "---:" for number in range(len(head))]
    return [f"| {' | '.join(line)} |" for line in (head, rule, *rows)]
