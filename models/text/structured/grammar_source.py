"""The text of a grammar, and a JSON schema as llguidance takes it: every answer that it then allows fits the schema.

Options of an answer have these texts, so neither MLX nor llguidance is imported here.

Keywords that cannot be honoured are refused by their path, those that llguidance loosens without a word too. Keywords
that constrain nothing are left out. The rest is written so that llguidance cannot leave it:

- Dates and times are patterns: its own formats allow the 29th of February in any year, and a second 60 in any minute.
- An object has the properties that are named, unless the schema says otherwise: models without an end in sight write
  keys for ever. (Such an answer fits the open schema as well.)
- Other keys come by a pattern: by its own rule for them, `"\\u0061"` is another key than `"a"`.

`Grammars` and `app.answer.options` ask for it. tests/models/text/structured/test_schema_check.py validates answers by
the given schema.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from headrace.runtime.errors import UsageError

MAX_BYTES = 256 << 10  # of a schema as text, far above those in use
MAX_DEPTH = 60  # levels of objects and lists
_LONGEST_NAME = 80  # characters of a name that a pattern leaves out: llguidance takes 250 brackets, three for each
_LONGEST_PATH = 100  # characters of a path that are shown
_EXACT = 2**53  # numbers beyond are rounded: llguidance reads them as doubles
# Dates and times of RFC 3339: any year but 0000, days of months in any year, days of leap years, hours with minutes.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP})"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_KNOWN_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # llguidance's own; others are notes
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # `items`: of older drafts
_SINGLE = ("items", "additionalProperties", "additionalItems")
_REFUSED = (
    "not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$defs", "definitions"}
# Hints.
_NO_GAIN = "leave it out or say it another way"
_CLOSE = "add additionalProperties: false"
_QUOTED = re.compile(r'["\\]')  # matched wrongly in the pattern of a key by llguidance 1.9
_LOOKAROUND = re.compile(r"\(\?<?[=!]")  # `(?=`, `(?!`, `(?<=`, `(?<!`
# Schemas that allow any value.
_ANY: tuple[object, ...] = (True, {}, None)


GrammarKind = Literal["schema", "regex", "grammar", "tools"]
"""Kinds of grammars. `grammars.py` alone uses "tools", for calls of tools without a source."""


class GrammarSource(Struct, frozen=True):
    """A JSON schema as text (`schema_text`), a regular expression, or a Lark grammar."""

    kind: GrammarKind
    text: str


def schema_text(schema: Mapping[str, object] | bool, *, masks_spell_keys: bool = True) -> str:
    """Return a schema as JSON text for llguidance.

    masks_spell_keys: the masks of the answer forbid other spellings of a key (`json_scan`). Without them, the pattern
    of an open object's other keys does, and open objects that `allOf` joins are refused by llguidance.
    Raises UsageError, with the path of the fault, for one that is too large or cannot be honoured wholly.
    """
    parts = list(itertools.islice(_walk(schema), MAX_BYTES))  # a value takes a byte at least
    if len(parts) == MAX_BYTES:
        raise UsageError(f"the schema is too large: more than {MAX_BYTES} values")
    if max(depth for depth, _, _ in parts) > MAX_DEPTH:
        raise UsageError(f"the schema is nested too deeply: more than {MAX_DEPTH} levels")
    if schema is False:
        raise UsageError("schema: false allows no answer")
    # A closed object leaves answers out. That is safe but where schemas have to fit together, or to exclude each other.
    closes = not any(_joins(part) for _, _, part in parts if isinstance(part, Mapping))
    rewriting = _SchemaRewriter(closes, masks_spell_keys)
    try:
        text = json.dumps(rewriting.schema(schema, "#"), ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError("the schema has a lone surrogate, which no text contains") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the schema is not JSON: {error}") from None
    if size > MAX_BYTES:
        raise UsageError(f"the schema is too large: {size} bytes, where one may have {MAX_BYTES}")
    return text


class _SchemaRewriter:
    """Schemas of one document. path: a JSON pointer."""

    def __init__(self, closes: bool, masks_spell_keys: bool) -> None:
        """Choose the rules of objects.

        closes: objects have the properties that are named, and no others.
        masks_spell_keys: see `schema_text`.
        """
        self._closes = closes
        self._stays_open = masks_spell_keys and not closes

    def schema(self, schema: object, path: str) -> object:
        """Return a schema, and those within it, rewritten. Raises UsageError."""
        if not isinstance(schema, Mapping):
            return schema
        _check(schema, path)
        changed = {key: self._within(key, value, f"{path}/{key}") for key, value in schema.items()}
        _drop_notes(changed)
        _write_dates(changed)
        self._rewrite_keys(changed, path)
        if isinstance(options := changed.get("anyOf"), list):
            changed["anyOf"] = _possible(options)
        return changed

    def _within(self, key: str, value: object, path: str) -> object:
        """Return the value of a keyword, rewritten if it is a schema or holds some."""
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self.schema(each, f"{path}/{name}") for name, each in value.items()}
        if key in _LISTED and isinstance(value, list | tuple):
            return [self.schema(each, f"{path}/{index}") for index, each in enumerate(value)]
        return self.schema(value, path) if key in _SINGLE else value

    def _rewrite_keys(self, schema: dict[str, Any], path: str) -> None:
        """Write the rule of an object's other keys, those that it does not name.

        An object is closed where that is safe. Else other keys get a pattern that excludes the names, or are refused
        where llguidance cannot match such a pattern.
        """
        names = _names(schema)
        patterns = schema.get("patternProperties")
        if "propertyNames" in schema:
            _take_names(schema, path)
        if self._stays_open or not (names or patterns) or schema.get("additionalProperties") is False:
            return
        can_close = self._closes and "additionalProperties" not in schema
        if can_close and not any(key in schema for key in ("anyOf", "$ref")):
            schema["properties"] = dict.fromkeys(names, True) | schema.get("properties", {})
            schema["additionalProperties"] = False
        elif patterns:
            raise _refusal(path, "patternProperties beside other keys", _CLOSE)
        elif any(map(_QUOTED.search, names)):
            raise _refusal(path, "a name with a quote or a backslash beside other keys", _CLOSE)
        elif any(len(name) > _LONGEST_NAME for name in names):
            raise _refusal(path, f"a name of more than {_LONGEST_NAME} characters beside other keys", _CLOSE)
        elif _is_object(schema) or "properties" in schema:
            others = schema.get("additionalProperties", True)
            # A name that is only required has the value of the other keys.
            schema["properties"] = dict.fromkeys(names, others) | schema.get("properties", {})
            schema["patternProperties"] = {_other_than(names): others}
            schema["additionalProperties"] = False


def _joins(schema: Mapping[str, object]) -> bool:
    """Return whether an answer has to fit several parts of a schema, or one alone of several."""
    joined = schema.get("allOf", ())
    is_one = isinstance(joined, list | tuple) and len(joined) <= 1
    return "oneOf" in schema or not is_one or (bool(joined) and not schema.keys() <= _NOTES | {"allOf"})


def _check(schema: Mapping[str, object], path: str) -> None:
    """Raise UsageError for a keyword that cannot be honoured, or would be loosened."""
    if "x-guidance" in schema:
        raise _refusal(path, "x-guidance", "leave it out")
    for keyword in _REFUSED:
        if keyword in schema:
            raise _refusal(path, keyword)
    if schema.get("uniqueItems"):
        raise _refusal(path, "uniqueItems")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise UsageError(f"schema: {_at(path)}$ref {reference!r:.80} is not within the schema", "put it under $defs")
    for keyword in _NUMBERS:
        for _, _, value in _walk(schema.get(keyword)):
            if isinstance(value, int | float) and abs(value) > _EXACT:
                raise UsageError(
                    f"schema: {_at(path)}{keyword} has a number beyond 2^53, which cannot be matched exactly"
                )
    least = schema.get("minProperties")
    required = schema.get("required")
    counted = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least - counted > 1 and schema.get("additionalProperties") is not False:
        # Keys that `properties` does not name may be repeated.
        raise _refusal(path, f"minProperties {least}", "name the properties, as required")


def _refusal(path: str, keyword: str, hint: str = _NO_GAIN) -> UsageError:
    """Return the error for a keyword that cannot be honoured."""
    return UsageError(f"schema: {_at(path)}{keyword} cannot be guaranteed", hint)


def _at(path: str) -> str:
    """Return a path before a keyword; nothing for the whole schema."""
    if path == "#":
        return ""
    if len(path) > _LONGEST_PATH:
        path = f"...{path[-_LONGEST_PATH:]}"
    return f"{path}: "


def _drop_notes(schema: dict[str, object]) -> None:
    """Leave out keywords that constrain nothing: formats without a rule of ours or llguidance's, and empty rules."""
    if schema.get("format") not in {*_FORMATS, *_KNOWN_FORMATS}:
        schema.pop("format", None)
    schema.pop("uniqueItems", None)
    if schema.get("propertyNames") in (*_ANY, {"type": "string"}):
        schema.pop("propertyNames", None)


def _write_dates(schema: dict[str, Any]) -> None:
    """Write the format of a date or time as a pattern."""
    if (pattern := _FORMATS.get(schema.get("format", ""))) is not None:
        del schema["format"]
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]


def _take_names(schema: dict[str, object], path: str) -> None:
    """Write `propertyNames` of an enumeration or a pattern as the object's keys."""
    rule = schema.pop("propertyNames")
    others = schema.get("additionalProperties", True)
    rest: dict[str, object] = {}
    if isinstance(rule, Mapping):
        rest = {key: value for key, value in rule.items() if key != "type"}
    if _names(schema) or "patternProperties" in schema or len(rest) != 1:
        raise _refusal(path, "propertyNames")
    match rest:
        case {"enum": list(names)} if all(isinstance(name, str) for name in names):
            schema["properties"] = dict.fromkeys(names, others)
        case {"pattern": str(pattern)}:
            schema["patternProperties"] = {pattern: others}
        case _:
            raise _refusal(path, "propertyNames")
    schema["additionalProperties"] = False


def _possible(options: list[object]) -> list[object]:
    """Return the options without those of lookaround, which no answer can be checked against, if others stay."""
    possible = [each for each in options if not _looks_around(each)]
    return possible or options


def _looks_around(option: object) -> bool:
    """Return whether an option has a pattern with lookaround."""
    return isinstance(option, Mapping) and _LOOKAROUND.search(str(option.get("pattern", ""))) is not None


def _names(schema: Mapping[str, object]) -> list[str]:
    """Return the keys that a schema names: its properties, and required ones."""
    named = schema.get("properties")
    required = schema.get("required")
    names: list[object] = []
    if isinstance(named, Mapping):
        names += named
    if isinstance(required, list):
        names += required
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _is_object(schema: Mapping[str, object]) -> bool:
    """Return whether a schema's type is, or may be, an object."""
    kinds = schema.get("type")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)


def _other_than(names: Iterable[str]) -> str:
    """Return a regular expression of all texts but `names`; llguidance has no lookaround, which would be shorter.

    Of "a" and "ab" it is `^(?s:|[^a].*|a([^b].*|b(.+)))$`, with each letter as its code (`_literal`).
    """
    return f"^(?s:{_rest_other_than(set(names))})$"


def _rest_other_than(rests: set[str]) -> str:
    """Return one of all texts but `rests`: a beginning that none has and anything, or a shared one and another rest.

    The shortest alternative is "", unless a name ends here.
    """
    firsts = sorted({rest[0] for rest in rests if rest})
    ends = [] if "" in rests else [""]
    if not firsts:
        return "|".join([*ends, ".+"])
    shared = [f"{_literal(first)}({_rest_other_than({r[1:] for r in rests if r[:1] == first})})" for first in firsts]
    return "|".join([*ends, f"[^{''.join(map(_literal, firsts))}].*", *shared])


def _literal(character: str) -> str:
    """Return the regular expression of one character."""
    return f"\\x{{{ord(character):x}}}"


def _walk(value: object) -> Iterator[tuple[int, str, object]]:
    """Yield every part of a JSON value: its depth, its key and itself."""
    waiting = [(0, "", value)]
    while waiting:
        depth, key, part = waiting.pop()
        yield depth, key, part
        if isinstance(part, Mapping):
            waiting += [(depth + 1, str(name), inner) for name, inner in part.items()]
        elif isinstance(part, list | tuple):
            waiting += [(depth + 1, "", inner) for inner in part]
