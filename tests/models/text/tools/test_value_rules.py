"""Rules of values, as text, in the form of a few marks: bounds of lists, unions, references, depths."""

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.models.text.tools.form import schema_json
from headrace.models.text.tools.value_rules import MAX_DEPTH, Schema, ValueRules


class Marks(ValueRules):
    """Pairs `key:value` in braces, items in brackets, both separated by commas; keys are sorted."""

    separator = ","
    of_kind = {"string": "STR", "object": "OBJ", "array": "ARR", "number": "NUM"}  # noqa: RUF012 - as in `ValueRules`

    def pair(self, key: str, value: str) -> str:
        return f'"{key}:" {value}'

    def object(self, pairs: str) -> str:
        return f'"{{" {pairs} "}}"'

    def item(self, value: str) -> str:
        return value

    def list(self, items: str) -> str:
        return f'"[" {items} "]"'

    def text(self, rule: str, _schema: Schema) -> Sequence[str]:
        return [f"{rule}: STR"]

    def scalar(self, value: str | float | None) -> str:
        return f'"{value}"'

    def order(self, properties: Schema) -> Schema:
        return dict(sorted(properties.items()))


class Ended(Marks):
    """The same with a mark after each value, and none between values."""

    end = "END"
    separator = ""


def rules(
    properties: Any, *, required: Sequence[str] = (), document: Any = None, form: type[ValueRules] = Marks
) -> dict[str, str]:
    """Return the rules of an object's properties, of tool 4, by name."""
    made = form(document or {})
    assert made.pairs("4", properties, required, 0) == "first4x0"
    return {name: lark.strip() for name, _, lark in (rule.partition(":") for rule in made.rules)}


def value(schema: Any, **options: Any) -> str:
    """Return the rule of one property's value."""
    return rules({"a": schema}, **options)["value4x0"]


def test_the_rules_of_an_example_are_those_in_the_module() -> None:
    hour = {"anyOf": [{"enum": [8, 9]}, {"type": "null"}]}
    properties = {
        "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
        "at": {"properties": {"hour": hour}},
    }
    assert rules(properties, required=["days"]) == {
        "first4x0": '"at:" value4x0 later4x1 | first4x1',
        "later4x0": '"," "at:" value4x0 later4x1 | later4x1',
        "first4x1": '"days:" value4x1 later4x2',
        "later4x1": '"," "days:" value4x1 later4x2',
        "first4x2": "",
        "later4x2": "",
        "value4x0": '"{" firstvalue4x0ox0 "}"',
        "firstvalue4x0ox0": '"hour:" valuevalue4x0ox0 latervalue4x0ox1 | firstvalue4x0ox1',
        "latervalue4x0ox0": '"," "hour:" valuevalue4x0ox0 latervalue4x0ox1 | latervalue4x0ox1',
        "firstvalue4x0ox1": "",
        "latervalue4x0ox1": "",
        "valuevalue4x0ox0": "valuevalue4x0ox0u0 | valuevalue4x0ox0u1",
        "valuevalue4x0ox0u0": '"8" | "9"',
        "valuevalue4x0ox0u1": "jsonvaluevalue4x0ox0u1",
        "jsonvaluevalue4x0ox0u1": f"%json {schema_json({'type': 'null'})}",
        "value4x1": '"[" (value4x1i ("," value4x1i){0,2})? "]"',
        "value4x1i": '"1" | "2"',
    }


@pytest.mark.parametrize(
    ("bounds", "items"),
    [
        ({}, "(V (, V){0,})?"),
        ({"minItems": 0, "maxItems": 1}, "(V (, V){0,0})?"),
        ({"minItems": 1}, "V (, V){0,}"),
        ({"minItems": 2, "maxItems": 5}, "V (, V){1,4}"),
        ({"minItems": 3, "maxItems": 3}, "V (, V){2,2}"),
        ({"maxItems": 0}, ""),
    ],
)
@pytest.mark.parametrize("form", [Marks, Ended])
def test_a_list_has_as_many_items_as_its_bounds_allow(bounds: Any, items: str, form: type[ValueRules]) -> None:
    rule = value({"type": "array", "items": {"enum": [1]}, **bounds}, form=form)
    separator = '"," ' if form is Marks else ""
    wanted = f'"[" {items} "]"'.replace(", V)", f"{separator}V)").replace("V", "value4x0i")
    assert rule == (wanted if form is Marks else f"({wanted}) END")


def test_properties_of_nested_objects_are_required_as_their_schema_says() -> None:
    nested = {"type": "object", "properties": {"b": {"enum": [1]}, "c": {"enum": [2]}}, "required": ["b"]}
    made = rules({"a": nested})
    assert made["firstvalue4x0ox0"] == '"b:" valuevalue4x0ox0 latervalue4x0ox1'
    assert made["firstvalue4x0ox1"] == '"c:" valuevalue4x0ox1 latervalue4x0ox2 | firstvalue4x0ox2'


def test_grammars_put_the_end_marker_after_each_value() -> None:
    assert value({"enum": [1, 2]}, form=Ended) == '("1" | "2") END'
    union = rules({"a": {"oneOf": [{"enum": [1]}, {"type": "boolean"}]}}, form=Ended)
    assert union["value4x0"] == "value4x0u0 | value4x0u1", "each choice has one"
    assert union["value4x0u0"] == '("1") END'
    assert union["value4x0u1"] == "(jsonvalue4x0u1) END"


def test_values_of_which_the_schema_says_too_little_are_any_of_their_types() -> None:
    assert value({"type": "object"}) == "OBJ"
    assert value({"type": ["array", "string"]}) == "ARR | STR"
    assert value({"enum": [[1], "x"]}) == "ARR | STR", "a list is no constant of the form"
    assert value({"type": "object", "anyOf": [{"properties": {"b": {}}}]}) == "OBJ"


def test_references_are_followed_as_often_as_nested_values() -> None:
    document = {"$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(9)}}
    document["$defs"][f"d{MAX_DEPTH}"] = {"enum": [7]}  # type: ignore[dict-item]
    assert value({"$ref": "#/$defs/d1"}, document=document) == '"7"', "after as many references as are followed"
    assert value({"$ref": "#/$defs/d0"}, document=document) != '"7"'


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_schemas_given_as_json_have_the_definitions_that_they_refer_to(key: str) -> None:
    definitions = {key: {"small": {"maximum": 3}}}
    schema = {"type": "integer", "allOf": [{"$ref": f"#/{key}/small"}]}
    made = rules({"a": schema}, document={**definitions, "title": "left out"})
    assert made["jsonvalue4x0"] == f"%json {schema_json({**schema, **definitions})}"


@pytest.mark.parametrize(
    ("nest", "free"),
    [
        (lambda inner: {"type": "object", "properties": {"b": inner}}, "OBJ"),
        (lambda inner: {"type": "array", "items": inner}, "ARR"),
        (lambda inner: {"anyOf": [inner, {"enum": [1]}]}, "NUM | STR"),
    ],
    ids=["objects", "lists", "unions"],
)
def test_values_nested_too_deeply_may_be_any(nest: Any, free: str) -> None:
    schema: Any = {"enum": ["innermost"]}
    for _ in range(MAX_DEPTH):
        schema = nest(schema)
    assert '"innermost"' in rules({"a": schema}).values()
    deeper = rules({"a": nest(schema)}).values()
    assert '"innermost"' not in deeper
    assert free in deeper
