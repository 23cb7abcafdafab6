"""JSON of commands and of the server, of values that JSON cannot have."""

import json
import math

import pytest

from headrace.app.output.document import json_text
from headrace.app.server.form import json_bytes

VALUES = {"a": [math.inf, -math.inf, 1.5], "b": {"c": (math.nan, "x\ud800")}, "d": True}


def no_number(name: str) -> None:
    pytest.fail(name)


@pytest.mark.parametrize("text", [json_text(VALUES), json_bytes(VALUES)])
def test_infinity_and_nan_are_null(text: str | bytes) -> None:
    read = json.loads(text, parse_constant=no_number)
    assert read == {"a": [None, None, 1.5], "b": {"c": [None, "x\ud800"]}, "d": True}
