"""Schemas as llguidance takes them: ordinary ones are taken, each answer fits, and a refusal names its place."""

import json
import re
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import jsonschema
import numpy as np
import pydantic
import pytest

from headrace.app.answer.generation import plain_schema
from headrace.models.text.structured.grammar_source import GrammarSource, schema_text
from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError
from tests.support.tiny_chat import write_byte_tokenizer

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}
NAMED = {"type": "object", "properties": {"a": INTEGER, "ab": INTEGER, "é\n": INTEGER}}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    tokenizer = Tokenizer.load(directory)
    return Grammars(tokenizer, tokenizer.vocab_size)


def takes(grammars: Grammars, schema: Any, text: str, *, masks_spell_keys: bool = True) -> bool:
    """Return whether an answer is allowed, apart from what masks forbid besides."""
    grammar = grammars.compile(GrammarSource("schema", schema_text(schema, masks_spell_keys=masks_spell_keys)))
    tokens = [*grammars.trie(text), grammars.trie.ends[0]]
    return grammar.start().allowed(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (NAMED, ['{"a":1,"ab":2}', "{}", '{"é\\n":3}'], ['{"b":1}', '{"\\u0061":"x"}', '{"a":"x"}']),
        (
            NAMED | {"additionalProperties": True},
            ['{"a":1,"abc":"x","b":{"a":"x"},"":null}', '{"é":"x","\\n":1}'],
            ['{"a":"x"}', '{"\\u0061":"x"}', '{"ab":"x"}', '{"\\u0061b":"x"}', '{"é\\n":"x"}', '{"\\u00e9\\n":"x"}'],
        ),
        (
            NAMED | {"additionalProperties": TEXT},
            ['{"a":1,"b":"x"}', '{"aa":"x"}'],
            ['{"b":1}', '{"a":"x"}', '{"\\u0061":"x"}'],
        ),
        ({"patternProperties": {"^x": INTEGER}, "type": "object"}, ['{"x":1,"xy":2}'], ['{"\\u0078":"s"}', '{"y":1}']),
        ({"type": "object"}, ['{"a":1,"b":[]}', "{}"], ["[]"]),
        ({"type": "object", "required": ["z"]}, ['{"z":[1]}'], ["{}"]),
        (
            {"type": "object", "required": ["z"], "additionalProperties": INTEGER},
            ['{"z":1}', '{"z":1,"y":2}'],
            ["{}", '{"z":"x"}', '{"z":1,"y":"x"}'],
        ),
        (
            {"type": "object", "properties": {"a": TEXT}, "required": ["z"], "additionalProperties": True},
            ['{"a":"x","z":[1]}'],
            ['{"a":"x"}', '{"a":1,"z":1}'],
        ),
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": INTEGER}, ['{"a":1}'], ['{"a":"x"}']),
        (
            {"type": "object", "propertyNames": {"enum": ["p", "q"]}, "additionalProperties": INTEGER},
            ['{"p":1,"q":2}', '{"q":2}'],
            ['{"r":1}', '{"p":"x"}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
            ['{"xp":1}'],
            ['{"p":1}', '{"xp":"1"}'],
        ),
        ({"type": "array", "uniqueItems": False, "items": TEXT | {"format": "password"}}, ['["a","a"]'], ["[1]"]),
        (
            {"type": "object", "properties": {"x-guidance": INTEGER, "not": {"const": {"not": 1}}, "if": TEXT}},
            ['{"x-guidance":1,"not":{"not":1},"if":"x"}'],
            ['{"not":1}'],
        ),
        ({"enum": [{"x-guidance": 1, "$ref": "http://a"}, {"format": "date"}]}, ['{"format":"date"}'], ["{}"]),
        (
            {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}], "type": "object"},
            ['{"a":1,"b":2}', "{}"],
            ['{"a":"x"}', '{"b":"x"}'],
        ),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)y"}]}, ["1.5"], ['"y"']),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}},
            ['{"c":{"c":{}}}'],
            ['{"d":1}', '{"c":1}'],
        ),
    ],
)
def test_ordinary_schemas_are_honoured(
    grammars: Grammars, schema: Mapping[str, Any], fitting: list[str], others: list[str]
) -> None:
    for text in fitting:
        jsonschema.validate(json.loads(text), schema)
        assert takes(grammars, schema, text), text
    for text in others:
        assert not takes(grammars, schema, text), text


def test_a_key_has_one_spelling_where_objects_stay_open(grammars: Grammars) -> None:
    schema = {"oneOf": [{"type": "object", "properties": {"a": INTEGER}}, {"type": "array"}]}
    matcher = grammars.compile(GrammarSource("schema", schema_text(schema))).start()
    allowed = {}
    for part in ('{"b', "\\", "u"):
        matcher.accept(grammars.trie(part))
        row = np.array(matcher.masks([]))[0]
        allowed[part] = {character for character in '\\u/n"06' if row[grammars.trie(character)[0]]}
    assert allowed == {'{"b': set('\\u/n"06'), "\\": set('\\u"n'), "u": {"0"}}


OPEN = {"type": "object", "properties": {"a": INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [OPEN | {"required": ["a"]}, {"type": "array"}]},
        OPEN | {"properties": {"a": INTEGER, "b": {"oneOf": [INTEGER, TEXT]}}},
        {"allOf": [OPEN, {"required": ["a"]}]},
        OPEN | {"allOf": [{"required": ["a"]}]},
    ],
)
def test_a_key_has_one_spelling_in_arguments_of_calls(grammars: Grammars, schema: Mapping[str, Any]) -> None:
    """Their grammar alone has to say so: masks know the keys of whole answers only."""
    for text, is_allowed in (('{"a":1,"c":"x"}', True), ('{"a":1,"\\u0061":"x"}', False), ('{"a":"x"}', False)):
        assert takes(grammars, schema, text, masks_spell_keys=False) == is_allowed, text


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OPEN, {"type": "object", "properties": {"b": TEXT}}]},
        OPEN | {"patternProperties": {"^x": INTEGER}, "oneOf": [{"required": ["a"]}]},
    ],
)
def test_open_objects_whose_keys_cannot_be_told_apart_are_refused_in_calls(
    grammars: Grammars, schema: Mapping[str, Any]
) -> None:
    refusal = grammars.refusal(schema)
    assert refusal is not None
    assert "cannot be guaranteed" in refusal
    grammars.compile(GrammarSource("schema", schema_text(schema)))


def test_a_key_has_one_spelling_in_an_answer_that_goes_on(grammars: Grammars) -> None:
    schema = {"oneOf": [OPEN, {"type": "array"}]}
    matcher = grammars.compile(GrammarSource("schema", schema_text(schema)), begun='{"').start()
    matcher.accept(grammars.trie("\\"))
    assert not np.array(matcher.masks([]))[0][grammars.trie("/")[0]]
    matcher.accept(grammars.trie("u"))
    assert not np.array(matcher.masks([]))[0][grammars.trie("6")[0]]


def test_a_schema_of_very_many_values_is_refused_before_they_are_walked() -> None:
    with pytest.raises(UsageError, match="too large"):
        schema_text({"enum": [[]] * 300_000})


def test_an_all_of_with_one_reference_closes_the_object() -> None:
    """pydantic 1 writes each nested class so."""
    schema = {"properties": {"a": {"title": "A", "allOf": [{"$ref": "#/$defs/x"}]}}, "$defs": {"x": OPEN}}
    assert json.loads(schema_text(schema))["$defs"]["x"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "schema: #/properties/a/items: not cannot be guaranteed"),
        ({"anyOf": [{}, {"if": True}]}, "schema: #/anyOf/1: if cannot be guaranteed"),
        ({"$defs": {"d": {"uniqueItems": True}}}, "schema: #/$defs/d: uniqueItems cannot be guaranteed"),
        ({"propertyNames": {"maxLength": 3}}, "schema: propertyNames cannot be guaranteed"),
        ({"items": {"maximum": 2**60}}, "schema: #/items: maximum has a number beyond 2^53"),
        ({"items": {"$ref": "http://a"}}, "schema: #/items: $ref 'http://a' is not within the schema"),
        (
            {"patternProperties": {"^x": INTEGER}, "additionalProperties": TEXT},
            "schema: patternProperties beside other keys cannot be guaranteed",
        ),
        (
            {"properties": {'"': INTEGER}, "additionalProperties": TEXT},
            "schema: a name with a quote or a backslash beside other keys cannot be guaranteed",
        ),
        (
            {"properties": {"x" * 5000: INTEGER}, "additionalProperties": TEXT},
            "schema: a name of more than 80 characters beside other keys cannot be guaranteed",
        ),
        ({"properties": {"x" * 200: {"not": {}}}}, "schema: ..." + "x" * 100 + ": not cannot be guaranteed"),
    ],
)
def test_a_refused_schema_names_the_path_of_the_keyword(schema: Mapping[str, Any], refusal: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(refusal)}"):
        schema_text(schema)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(pydantic.BaseModel):
    name: str
    parent: "Inner | None" = None


class Everything(pydantic.BaseModel):
    """Pydantic's ordinary types."""

    text: str = pydantic.Field(min_length=1, max_length=5)
    whole: int = pydantic.Field(ge=0, lt=100)
    real: float
    yes: bool
    nothing: None
    exact: Decimal
    day: date
    moment: datetime
    hour: time
    length: timedelta
    number: UUID
    address: IPv4Address | IPv6Address
    path: Path
    data: bytes
    secret: pydantic.SecretStr
    url: pydantic.HttpUrl
    rule: re.Pattern[str]
    colour: Colour
    choice: Literal["a", 1]
    several: list[int]
    different: set[str]
    pair: tuple[int, str]
    counts: dict[str, int]
    inner: Inner
    maybe: Inner | str | None = None
    anything: Any = None


def test_pydantics_ordinary_types_are_taken(grammars: Grammars) -> None:
    text = (
        '{"text":"x","whole":99,"real":0.5,"yes":true,"nothing":null,"exact":1.25,"day":"2024-02-29",'
        '"moment":"2024-02-29T12:00:00Z","hour":"12:00:00Z","length":"P3D",'
        '"number":"00000000-0000-4000-8000-000000000000","address":"127.0.0.1","path":"/a","data":"x","secret":"s",'
        '"url":"http://a.b/","rule":"a+","colour":"red","choice":1,"several":[1,2],"different":["a"],"pair":[1,"x"],'
        '"counts":{"a":1},"inner":{"name":"x","parent":{"name":"y"}},"maybe":null,"anything":{"a":[]}}'
    )
    assert takes(grammars, plain_schema(Everything), text)
    assert Everything.model_validate_json(text).inner.parent == Inner(name="y")
    assert not takes(grammars, plain_schema(Everything), text.replace('"whole":99', '"whole":100'))
