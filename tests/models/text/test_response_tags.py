"""The tags around an answer go, whole or in pieces; others stay."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.models.text.response_tags import ResponseStream, asks_for_tags


@pytest.mark.parametrize("size", [1, 4, 99])
@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("<think>hm</think>\n<response>\nYes.</response>", "<think>hm</think>Yes."),
        ("<response>Yes.\n</response>\n", "Yes.\n"),
        ("<think>a <response> tag</think>No.", "<think>a <response> tag</think>No."),
        ("Write <response>x</response>", "Write <response>x</response>"),
        ("<response>Write </response> at the end.</response>", "Write </response> at the end."),
        ("<response>Cut </resp", "Cut </resp"),
        ("<resp", "<resp"),
        ("<think>never ends", "<think>never ends"),
        ("", ""),
    ],
)
def test_response_tags_are_removed(said: str, text: str, size: int) -> None:
    pieces = [said[at : at + size] for at in range(0, len(said), size)]
    inner: Any = SimpleNamespace(add=pieces.__getitem__, finish=lambda **_: "")
    stream = ResponseStream(inner)
    assert "".join(map(stream.add, range(len(pieces)))) + stream.finish() == text


def test_a_template_asks_for_them() -> None:
    assert asks_for_tags("Write your response between <response></response> tags.")
    assert not asks_for_tags("{{ '<tool_response>' }}</tool_response>")
