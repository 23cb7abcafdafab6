"""The prompt of `headrace run`: piped text, the argument, and attached text files.

Guard: tests/app/cli/test_run_settings.py.
"""

import os
import select
import stat
import sys
from collections.abc import Sequence

from headrace.app.chat.attachments import read_attachments, take_attachments
from headrace.app.cli.say import say
from headrace.app.config.bounded_input import PROMPT, decoded, read_bounded
from headrace.app.sessions.records import Attachment
from headrace.runtime.errors import UsageError

STDIN = "-"
"""Argument that stands for standard input."""
_PATIENCE_S = 1.0  # for piped text, before a line says that it is awaited


def read_prompt(
    argument: str | None, files: Sequence[str] = (), *, raw: bool = False
) -> tuple[str, tuple[Attachment, ...]]:
    """Return the text (piped text, a blank line, the argument) and its files. Raises UsageError if both are empty.

    `-` as the argument reads standard input, a terminal too. Beside another argument, a file whose beginning was read
    by a shell's `while read` is left to that. `@path` names a file in the argument, not in piped text; with `raw`
    nowhere.
    """
    is_ours = argument == STDIN or not (sys.stdin.isatty() or (argument and _is_being_read()))
    piped = ""
    if is_ours:
        piped = piped_text()
    typed = ""
    if argument is not None and argument != STDIN:
        typed = argument
    mentioned: tuple[Attachment, ...] = ()
    if not raw:
        typed, mentioned = take_attachments(typed)
    attachments = dict.fromkeys((*(attachment for name in files for attachment in read_attachments(name)), *mentioned))
    parts = [part for part in (piped.strip("\n"), typed) if part.strip()]
    if not parts and not attachments:
        raise UsageError("no prompt", 'headrace run "Why is the sky blue?", or pipe text in')
    return "\n\n".join(parts), tuple(attachments)


def piped_text() -> str:
    """Return standard input, and say so where it does not come. Raises UsageError unless it is UTF-8."""
    source = None
    if not sys.stdin.isatty():
        source = _descriptor()
    if source is not None and not select.select([source], [], [], _PATIENCE_S)[0]:
        say("waiting for text on standard input (</dev/null: there is none)", err=True)
    return decoded(read_bounded(None, PROMPT), "standard input")


def _is_being_read() -> bool:
    """Return whether standard input is a file of which somebody has read the beginning."""
    source = _descriptor()
    if source is None or not stat.S_ISREG(os.fstat(source).st_mode):
        return False
    return os.lseek(source, 0, os.SEEK_CUR) > 0


def _descriptor() -> int | None:
    """Return the descriptor of standard input; None where a program has put an object in its place."""
    try:
        return sys.stdin.fileno()
    except (OSError, ValueError):
        return None
