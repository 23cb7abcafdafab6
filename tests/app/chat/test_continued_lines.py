"""Messages of several lines: a trailing backslash and triple quotes."""

import pytest

from headrace.app.chat.continued_lines import begins_line, unquoted_lines, with_new_line


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("one", None),
        ("one\\", "one\n"),
        ("one\n two\\", "one\n two\n"),
        ("x \\\\", None),
        ('"""', '"""\n'),
        ('"""one', '"""one\n'),
        ('"""path\\', '"""path\\\n'),
        ('"""one"""', None),
        ('"""A module."""\n\nimport os', None),
        ('say """', None),
        ("", None),
    ],
)
def test_a_backslash_and_open_quotes_begin_a_line(text: str, more: str | None) -> None:
    assert begins_line(text) == (more is not None)
    if more is not None:
        assert with_new_line(text) == more


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""\none\n\ntwo\n"""', "one\n\ntwo"),
        ('"""one"""\n', "one"),
        ('"""A module."""\n\nimport os', '"""A module."""\n\nimport os'),
        ('"""a""" and """b"""', '"""a""" and """b"""'),
        ("plain", "plain"),
        ('""""""', ""),
    ],
)
def test_quotes_around_the_whole_message_are_not_sent(typed: str, message: str) -> None:
    assert unquoted_lines(typed) == message
