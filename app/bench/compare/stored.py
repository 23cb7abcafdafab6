"""Benchmark documents read from files, which may be edited, truncated or of another kind."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.app.bench.measure.document import SCHEMA
from headrace.app.config.bounded_input import DOCUMENT, decoded, read_bounded
from headrace.runtime.errors import UsageError

_Check = Callable[[Any], bool]
_SHOWN = 80  # characters of a wrong value
_HINT = "`headrace bench --json > FILE` writes a whole document"


def _text(value: Any) -> bool:
    """Return whether it is a text that can be printed: half a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _depth(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**53


def _rate(value: Any) -> bool:
    """Return whether it is a positive number of a plausible size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-12 < value < 1e15


def _rate_or_none(value: Any) -> bool:
    return value is None or _rate(value)


def _list(value: Any) -> bool:
    return isinstance(value, list)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


# The parts that comparisons and the history read.
_DOCUMENT: dict[str, _Check] = {"created": _text, "command": _text, "versions": _texts}
_DEVICE: dict[str, _Check] = {
    "name": _text, "backend": _text, "kernels": _texts, "measured_peak_gb_s": _rate_or_none
}  # fmt: skip
_MODEL: dict[str, _Check] = {"name": _text}
_RESULT: dict[str, _Check] = {"test": _text, "depth": _depth, "model": _text, "engine": _text}
_REPETITION: dict[str, _Check] = {"typical_tokens_per_second": _rate, "memory_gb_s": _rate_or_none}


def read_document(path: Path) -> dict[str, Any]:
    """Return the document in `path`, the last line's if there are several. Raises UsageError for other files."""
    text = decoded(read_bounded(path, DOCUMENT), str(path))
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return checked(found, str(path))
    raise UsageError(f"{path} is not a benchmark document", "`headrace bench --json > FILE` writes one")


def checked(found: object, where: str) -> dict[str, Any]:
    """Return `found` if it has our schema and all that is read of it. Raises UsageError otherwise."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise UsageError(f"{where} is not a {SCHEMA} document (schema: {repr(schema)[:_SHOWN]})")
    for path, part, checks in _parts(found):
        if not isinstance(part, dict):
            raise UsageError(f"{where}: {path or 'it'} is no JSON object", _HINT)
        for key, check in checks.items():
            if key not in part or not check(part[key]):
                state = "has no usable value" if key in part else "is missing"
                raise UsageError(f"{where}: {path}{'.' if path else ''}{key} {state}", _HINT)
    return found


def _parts(found: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, _Check]]]:
    """Yield every object that is read: its path, itself, and the checks of its keys."""
    yield "", found, {**_DOCUMENT, "results": _list}
    yield "device", found.get("device"), _DEVICE
    yield "model", found.get("model"), _MODEL
    for number, entry in enumerate(found["results"]):
        path = f"results[{number}]"
        yield path, entry, {**_RESULT, "repetitions": _list}
        yield f"{path}.tokens_per_second", entry.get("tokens_per_second"), {"mean": _rate}
        for place, repetition in enumerate(entry["repetitions"]):
            yield f"{path}.repetitions[{place}]", repetition, _REPETITION
