"""The prompt of `headrace run`: piped text, the argument, and attached text files."""

import sys
from collections.abc import Sequence

from headrace.app.chat.attachments import read_attachments, take_attachments
from headrace.app.config.bounded_input import PROMPT, read_bounded
from headrace.app.sessions.records import Attachment
from headrace.runtime.errors import UsageError

STDIN = "-"


def read_prompt(
    argument: str | None, files: Sequence[str] = (), *, raw: bool = False
) -> tuple[str, tuple[Attachment, ...]]:
    """Return the text (piped text, a blank line, the argument) and its files. Raises UsageError if both are empty.

    `-` as the argument reads standard input, a terminal too. `@path` names a file in the argument, not in piped text;
    with `raw` nowhere.
    """
    piped = piped_text() if argument == STDIN or not sys.stdin.isatty() else ""
    typed = argument if argument and argument != STDIN else ""
    mentioned: tuple[Attachment, ...] = ()
    if not raw:
        typed, mentioned = take_attachments(typed)
    attachments = dict.fromkeys((*(one for name in files for one in read_attachments(name)), *mentioned))
    parts = [part for part in (piped.strip("\n"), typed) if part.strip()]
    if not parts and not attachments:
        raise UsageError("no prompt", 'headrace run "Why is the sky blue?", or pipe text in')
    return "\n\n".join(parts), tuple(attachments)


def piped_text() -> str:
    """Return standard input. Raises UsageError unless it is UTF-8."""
    try:
        return read_bounded(None, PROMPT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text (byte {error.start})") from None
