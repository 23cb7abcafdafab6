"""Text appended as it comes: whole lines, and one end of line at the end."""

import pytest

from headrace.app.output.plain_output import PlainOutput


@pytest.mark.parametrize("pieces", [["a\r", "\n"], ["a\n"], ["a", ""], ["a"]])
def test_the_last_line_ends_once(pieces: list[str]) -> None:
    appended: list[str] = []
    output = PlainOutput(appended.append)
    for piece in pieces:
        output.write(piece)
    output.end()
    output.end()
    assert "".join(appended) == "a\n"
