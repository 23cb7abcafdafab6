"""Print a command's lines, JSON documents and questions: sanitised text, indented ASCII JSON.

Text that may be a model's or a file's is printed with `say`; `click.echo` is for texts of headrace alone.

Guards: tests/app/cli/test_hostile_names.py for texts, test_sessions.py for questions and JSON.
"""

import json
import sys

import click

from headrace.app.output.document import json_text
from headrace.app.output.sanitise import sanitise
from headrace.app.output.terminal import may_style
from headrace.runtime.errors import HeadraceError, UsageError


def say(text: str, *, err: bool = False) -> None:
    """Print `text` and a newline."""
    click.echo(sanitise(text), err=err)


def confirm(question: str, action: str) -> None:
    """Ask on standard error whether something is to be removed. action: such as `deleting 3f2a`.

    Raises HeadraceError for "no", UsageError where nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"cannot ask before {action}: stdin is no terminal", "--yes does not ask")
    if not click.confirm(question, err=True):
        raise HeadraceError("nothing was removed")


def dimmed(text: str, *, err: bool = False) -> str:
    """Return `text` in a dim style, where the stream's terminal has styles."""
    if not may_style(sys.stderr if err else sys.stdout):
        return text
    return click.style(text, dim=True)


def print_json(document: object) -> None:
    """Print `document` and a newline. Raises as `checked_json`."""
    click.echo(checked_json(document))


def checked_json(document: object) -> str:
    """Return `document` as JSON.

    Raises UsageError for text that is not UTF-8: Python has lone surrogates for its other bytes, and JSON cannot.
    """
    text = json_text(document)
    if "\\ud" in text:  # a surrogate, alone or of a pair
        try:
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            before = error.object[: error.start].rpartition('"')[2]
            after = error.object[error.start :].partition('"')[0]
            raise UsageError(
                f"{before}{after} is not UTF-8, as JSON has to be", "without --json the command prints it"
            ) from None
    return text
