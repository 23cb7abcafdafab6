"""Documents as typed objects: errors in our words, with the path of the field."""

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from headrace.runtime.config.typed import typed


class Row(Struct, forbid_unknown_fields=True):
    name: str
    rate: Annotated[float, Meta(gt=0, le=100)] = 1.0
    note: str | None = None


class Table(Struct, frozen=True):
    rows: tuple[Row, ...]
    names: dict[str, str]


def test_a_document_becomes_objects() -> None:
    found = typed(Table, {"rows": [{"name": "a", "rate": 3}], "names": {"x": "y"}, "later": 1})
    assert found == Table((Row("a", 3.0),), {"x": "y"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "rows[0].name is missing"),
        ({"name": "a", "nmae": 1}, "rows[0] has the unknown key nmae"),
        ({"name": 5}, "rows[0].name must be a text, not a whole number"),
        ({"name": "a", "note": []}, "rows[0].note must be a text or null, not a list"),
        ({"name": "a", "rate": True}, "rows[0].rate must be a number, not true or false"),
        ({"name": "a", "rate": 0}, "rows[0].rate must be above 0"),
        ({"name": "a", "rate": float("nan")}, "rows[0].rate must be above 0"),
        ({"name": "a", "rate": 101}, "rows[0].rate must be at most 100"),
        ({"name": "a", "rate": 10**400}, "rows[0].rate has no usable value"),
        ({"name": "a", "rate": "\ud800"}, "half a surrogate pair is no text"),
        (None, "rows[0] must be an object, not null"),
    ],
)
def test_the_first_wrong_field_is_named_by_its_path(row: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        typed(Table, {"rows": [row], "names": {}})
    assert str(caught.value) == words


@pytest.mark.parametrize("value", [None, [], "x", {"rows": {}, "names": {}}, {"rows": [], "names": {"x": 1}}])
def test_other_documents_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r" must be .*, not "):
        typed(Table, value)
