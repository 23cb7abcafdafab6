"""Bodies of requests that cost more than their size: those of many values, and deep ones."""

import json
import tracemalloc

import pytest

from headrace.app.server.body import MAX_LEVELS, parse_object
from headrace.app.server.errors import ApiError


@pytest.mark.parametrize("value", ["[]", "{}", "1.5", "[[]]"])
def test_millions_of_values_are_refused_before_they_are_made(value: str) -> None:
    data = f'{{"messages": [{(value + ",") * (8_000_000 // len(value))}{value}]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="values"):
            parse_object(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(data)


def test_long_texts_with_commas_are_accepted() -> None:
    text = 'a, b, [c], {d}, "e", \\ ' * 100_000
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"b": ', "}")])
def test_depth_has_a_limit(opening: str, closing: str) -> None:
    """The limit is far below the depth at which functions fail that call themselves for each level."""

    def body(levels: int) -> bytes:
        inner = opening * (levels - 1) + "[]" + closing * (levels - 1)
        return f'{{"a": {inner}}}'.encode()

    assert parse_object(body(MAX_LEVELS - 1))
    with pytest.raises(ApiError, match="deeply"):
        parse_object(body(MAX_LEVELS))
