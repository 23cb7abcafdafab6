"""Schemas as people and libraries write them, and Hypothesis-made ones, for constrained answers."""

from typing import Any

from hypothesis import strategies as st

_ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string"},
        "city": {"type": "string"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
        "country": {"enum": ["DE", "FR", "US"]},
    },
    "required": ["street", "city", "country"],
    "additionalProperties": False,
}

REAL: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "sentiment": {
        "type": "object",
        "properties": {
            "label": {"enum": ["positive", "negative", "neutral"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["label", "confidence"],
        "additionalProperties": False,
    },
    "address": _ADDRESS,
    "invoice": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Invoice",
        "type": "object",
        "properties": {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "date": {"type": "string", "format": "date"},
            "customer": {"$ref": "#/$defs/party"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 3},
            "paid": {"type": "boolean"},
        },
        "required": ["number", "date", "customer", "lines", "paid"],
        "additionalProperties": False,
        "$defs": {
            "party": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "address": _ADDRESS},
                "required": ["name"],
                "additionalProperties": False,
            },
            "line": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer", "exclusiveMinimum": 0},
                    "price": {"type": "number"},
                },
                "required": ["item", "count", "price"],
                "additionalProperties": False,
            },
        },
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
    },
    "pydantic": {
        "$defs": {
            "Size": {"enum": ["small", "large"], "title": "Size", "type": "string"},
            "Pet": {
                "properties": {
                    "name": {"title": "Name", "type": "string"},
                    "size": {"$ref": "#/$defs/Size"},
                    "owner": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Owner"},
                },
                "required": ["name", "size"],
                "title": "Pet",
                "type": "object",
            },
        },
        "properties": {"pets": {"items": {"$ref": "#/$defs/Pet"}, "maxItems": 2, "title": "Pets", "type": "array"}},
        "required": ["pets"],
        "title": "Shop",
        "type": "object",
    },
    "tagged union": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
                "required": ["kind", "radius"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "box"}, "width": {"type": "number"}},
                "required": ["kind", "width"],
                "additionalProperties": False,
            },
        ]
    },
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"ok": {"const": True}},
                "required": ["ok"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"error": {"type": "string"}},
                "required": ["error"],
                "additionalProperties": False,
            },
        ]
    },
    "tool call": {
        "type": "object",
        "properties": {
            "name": {"const": "get_weather"},
            "arguments": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
    "user": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "email": {"type": "string", "format": "email"},
            "created": {"type": "string", "format": "date-time"},
            "roles": {"type": "array", "items": {"enum": ["admin", "editor", "viewer"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["id", "email", "created", "roles"],
        "additionalProperties": False,
    },
    "point": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False, "minItems": 2},
    "geojson": {
        "type": "object",
        "properties": {
            "type": {"const": "Point"},
            "coordinates": {
                "type": "array",
                "items": {"type": "number", "minimum": -180, "maximum": 180},
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["type", "coordinates"],
        "additionalProperties": False,
    },
    "settings map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "environment": {
        "type": "object",
        "patternProperties": {"^[A-Z_]{1,8}$": {"type": "string", "maxLength": 8}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "extraction": {
        "type": "object",
        "properties": {
            "title": {"type": ["string", "null"]},
            "year": {"type": ["integer", "null"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["title", "year", "tags"],
        "additionalProperties": False,
    },
    "steps": {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            },
            "final_answer": {"type": "string"},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    },
    "package": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,20}$"},
            "version": {"type": "string", "pattern": "^\\d{1,3}\\.\\d{1,3}\\.\\d{1,3}$"},
            "private": {"type": "boolean"},
            "license": {"enum": ["MIT", "Apache-2.0"]},
        },
        "required": ["name", "version"],
        "additionalProperties": False,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
            {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        ]
    },
    "measurement": {
        "type": "object",
        "properties": {
            "value": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
            "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
            "unit": {"type": "string", "minLength": 1, "maxLength": 3},
        },
        "required": ["value", "step", "unit"],
        "additionalProperties": False,
    },
    "yes or no": {"enum": ["yes", "no", None, 3, ["maybe"]]},
}

_NAMES = st.sampled_from(["a", "b", "name", "x y", "é", 'q"', "$id"])


def _leaf() -> st.SearchStrategy[dict[str, Any]]:
    whole = st.integers(-1000, 1000)
    return st.one_of(
        st.just({"type": "null"}),
        st.just({"type": "boolean"}),
        st.tuples(whole, whole).map(lambda ends: {"type": "integer", "minimum": min(ends), "maximum": max(ends)}),
        st.tuples(whole, whole).map(lambda ends: {"type": "number", "minimum": min(ends), "maximum": max(ends)}),
        st.tuples(st.integers(0, 3), st.integers(3, 6)).map(
            lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[1]}
        ),
        st.sampled_from(["^[ab]{1,3}$", "x", "^(red|green) ?[0-9]$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 9}
        ),
        st.lists(st.one_of(st.none(), st.booleans(), whole, st.text(max_size=4)), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.one_of(st.none(), whole, st.text(max_size=4)).map(lambda value: {"const": value}),
    )


def _inner(schemas: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def with_required(properties: dict[str, Any], number: int) -> dict[str, Any]:
        required = [name for place, name in enumerate(properties) if number >> place & 1]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.tuples(schemas, st.integers(0, 2), st.integers(2, 3)).map(
            lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[2]}
        ),
        st.lists(schemas, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        ),
        st.builds(with_required, st.dictionaries(_NAMES, schemas, max_size=3), st.integers(0, 7)),
        st.lists(schemas, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    )


def made() -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of the supported keywords, small enough that a model that babbles ends its answer."""
    return st.recursive(_leaf(), _inner, max_leaves=6)
