"""JSON of commands and of the server, of values that JSON cannot have."""

import json
import math
import sys

import pytest

from headrace.app.output.document import json_text, typed_command
from headrace.app.server.form import json_bytes

VALUES = {"a": [math.inf, -math.inf, 1.5], "b": {"c": (math.nan, "x\ud800")}, "d": True}


def no_number(name: str) -> None:
    pytest.fail(name)


@pytest.mark.parametrize("text", [json_text(VALUES), json_bytes(VALUES)])
def test_infinity_and_nan_are_null(text: str | bytes) -> None:
    read = json.loads(text, parse_constant=no_number)
    assert read == {"a": [None, None, 1.5], "b": {"c": [None, "x\ud800"]}, "d": True}


def test_a_command_with_bytes_that_are_not_utf_8_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "--text", "m\udcffll é"])
    assert typed_command() == "headrace bench --text 'm\\xffll é'"
