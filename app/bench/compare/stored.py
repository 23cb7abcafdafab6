"""Benchmark documents read from files, which may be edited, truncated or of another kind."""

import json
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.app.bench.measure.document import SCHEMA
from headrace.app.config.bounded_input import DOCUMENT, decoded, read_bounded
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import UsageError

_SHOWN = 80  # characters of a wrong value
_HINT = "`headrace bench --json > FILE` writes a whole document"
_Text = Annotated[str, Meta(pattern="^[^\ud800-\udfff]*$")]  # half a surrogate pair cannot be printed
_Rate = Annotated[float, Meta(gt=1e-12, lt=1e15)]


class _Repetition(Struct):
    typical_tokens_per_second: _Rate
    memory_gb_s: _Rate | None


class _Speed(Struct):
    mean: _Rate


class _Result(Struct):
    test: _Text
    depth: Annotated[int, Meta(ge=0, lt=2**53)]
    model: _Text
    engine: _Text
    tokens_per_second: _Speed
    repetitions: list[_Repetition]


class _Device(Struct):
    name: _Text
    backend: _Text
    kernels: dict[str, _Text]
    measured_peak_gb_s: _Rate | None


class _Model(Struct):
    name: _Text


class _Document(Struct):
    """The parts of a document that comparisons and the history read."""

    created: _Text
    command: _Text
    versions: dict[str, _Text]
    device: _Device
    model: _Model
    results: list[_Result]


def read_document(path: Path) -> dict[str, Any]:
    """Return the document in `path`, the last line's if there are several. Raises UsageError for other files."""
    text = decoded(read_bounded(path, DOCUMENT), str(path))
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            document = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return checked(document, str(path))
    raise UsageError(f"{path} is not a benchmark document", "`headrace bench --json > FILE` writes one")


def checked(document: object, where: str) -> dict[str, Any]:
    """Return the document if it has our schema and all that is read of it. Raises UsageError otherwise."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else None
        raise UsageError(f"{where} is not a {SCHEMA} document (schema: {repr(schema)[:_SHOWN]})")
    try:
        typed(_Document, document)
    except ValueError as error:
        raise UsageError(f"{where}: {error}", _HINT) from None
    return document
