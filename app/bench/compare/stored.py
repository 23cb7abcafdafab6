"""Benchmark documents read from files, which may be edited, truncated or of another kind."""

import json
from pathlib import Path
from typing import Any

from headrace.app.bench.measure.document import SCHEMA
from headrace.app.config.bounded_input import DOCUMENT, read_bounded
from headrace.runtime.errors import UsageError

_RESULT_KEYS = ("test", "depth", "model", "engine", "tokens_per_second", "repetitions")


def read_document(path: Path) -> dict[str, Any]:
    """Return the document in `path`, the last line's if there are several. Raises UsageError for other files."""
    try:
        text = read_bounded(path, DOCUMENT).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a benchmark document: not UTF-8 text") from None
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return checked(found, str(path))
    raise UsageError(f"{path} is not a benchmark document", "`headrace bench --json > FILE` writes one")


def checked(found: object, where: str) -> dict[str, Any]:
    """Return `found` if it has our schema. Raises UsageError otherwise."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise UsageError(f"{where} is not a {SCHEMA} document (schema: {schema!r})")
    results = found.get("results")
    if not isinstance(results, list) or not all(
        isinstance(entry, dict) and all(key in entry for key in _RESULT_KEYS) for entry in results
    ):
        raise UsageError(f"{where} has no usable results")
    return found
