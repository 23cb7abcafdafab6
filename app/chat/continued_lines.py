"""Messages of several lines: a trailing backslash and triple quotes begin another line.

The input of the full screen and of the line chat follow these rules; docs/chat.md describes them.

Guard: tests/app/chat/test_continued_lines.py.
"""

QUOTES = '"""'


def begins_line(text: str) -> bool:
    """Return whether Enter after this text begins another line: quotes are open, or the text ends with a backslash."""
    if text.startswith(QUOTES) and text.count(QUOTES) % 2:
        return True
    backslashes = len(text) - len(text.rstrip("\\"))
    return backslashes % 2 == 1  # two are a line break of LaTeX


def with_new_line(text: str) -> str:
    """Return the text with a new line at its end, in place of a trailing backslash."""
    in_quotes = text.startswith(QUOTES) and text.count(QUOTES) % 2
    if not in_quotes:
        text = text.removesuffix("\\")
    return f"{text}\n"


def unquoted_lines(text: str) -> str:
    """Return the text between triple quotes around all of it, else the text as it is."""
    if text.startswith(QUOTES) and text.rstrip().endswith(QUOTES) and text.count(QUOTES) == 2:
        return text.rstrip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text
