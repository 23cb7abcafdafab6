"""Benchmark documents read from files, which may be edited, truncated or of another kind.

`bench compare` and `bench history` read them here, and `checked` is the only way from JSON to a `RunDocument`.
Documents of older versions stay readable: a new field of `records.py` needs a default.
"""

import json
from pathlib import Path

from headrace.app.bench.measure.records import SCHEMA, RunDocument
from headrace.app.config.bounded_input import DOCUMENT, decoded, read_bounded
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import UsageError

_SHOWN = 80  # characters of a wrong value
_HINT = "`headrace bench --json > FILE` writes a whole document"


def read_document(path: Path) -> RunDocument:
    """Return the document in `path`, the last line's if there are several. Raises UsageError for other files."""
    text = decoded(read_bounded(path, DOCUMENT), str(path))
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            document = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return checked(document, str(path))
    raise UsageError(f"{path} is not a benchmark document", "`headrace bench --json > FILE` writes one")


def checked(document: object, where: str) -> RunDocument:
    """Return parsed JSON as a document. Raises UsageError if it has another schema, or not all of ours."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = None
        if isinstance(document, dict):
            schema = document.get("schema")
        raise UsageError(f"{where} is not a {SCHEMA} document (schema: {repr(schema)[:_SHOWN]})")
    try:
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed
        return typed(RunDocument, document)
    except UnicodeEncodeError:
        raise UsageError(f"{where}: half a surrogate pair is no text", _HINT) from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}", _HINT) from None
