"""Text appended as it comes: whole lines, and one end of line at the end."""

import pytest

from headrace.app.output.plain_output import PlainOutput


@pytest.mark.parametrize("pieces", [["a\r", "\n"], ["a\n"], ["a", ""], ["a"]])
def test_plain_output_ends_with_one_line_break(pieces: list[str]) -> None:
    appended: list[str] = []
    output = PlainOutput(appended.append)
    for piece in pieces:
        output.write(piece)
    output.end()
    output.end()
    assert "".join(appended) == "a\n"


def test_each_text_of_plain_output_is_sanitised_separately() -> None:
    appended: list[str] = []
    output = PlainOutput(appended.append)
    for text in ("a\r", "\nع", "\u200db"):
        output.write(text)
        output.end()
    assert "".join(appended) == "a\n\nع\n‹U+200D›b\n"
