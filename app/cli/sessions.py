"""`headrace sessions`: list, show, rename, rm, search, export, doctor.

SESSION is an id, its beginning, or `last`. Stored texts are sanitised before they are printed.

Guard: tests/app/cli/test_sessions.py.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click
from msgspec.structs import asdict

from headrace.app.cli.completion import session_ids
from headrace.app.cli.decorators import json_option
from headrace.app.cli.say import confirm, print_json
from headrace.app.output.document import json_text
from headrace.app.output.output_file import write_output
from headrace.app.output.sanitise import safe_line
from headrace.app.output.tables import Column, print_table
from headrace.app.sessions.examine import Examination, examine
from headrace.app.sessions.export import page, to_document
from headrace.app.sessions.kv_cache import delete_kv_cache
from headrace.app.sessions.records import Message
from headrace.app.sessions.search import search as search_sessions
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import SessionError, UsageError
from headrace.runtime.metrics.units import counted


@click.group()
def sessions() -> None:
    """List, show, search, export, examine and delete stored conversations."""


@sessions.command("list")
@click.option("-n", "--limit", type=click.IntRange(1), help="Maximum number of conversations [all].")
@json_option
def list_sessions(limit: int | None, as_json: bool) -> None:
    """List conversations, most recently used first."""
    with closing(SessionStore(to_read=True)) as store:
        entries = store.sessions(limit)
    if as_json:
        print_json([{**asdict(entry.session), "messages": entry.messages} for entry in entries])
        return
    if not entries:
        click.echo("no conversations yet", err=True)
        return
    columns = [
        Column("", [entry.session.id for entry in entries], right=False),
        Column("", [_when(entry.session.updated_at) for entry in entries], leaves=2),
        Column("", [str(entry.messages) for entry in entries], leaves=3),
        Column("", [safe_line(entry.title) for entry in entries], right=False, least=16),
        Column("", [safe_line(entry.session.model or "") for entry in entries], leaves=1, right=False),
    ]
    print_table(columns, header=False)


@sessions.command()
@click.argument("session", shell_complete=session_ids)
@json_option
def show(session: str, as_json: bool) -> None:
    """Print the conversation SESSION as Markdown."""
    form = "markdown"
    if as_json:
        form = "json"
    _export(session, form, None)


@sessions.command()
@click.argument("session", shell_complete=session_ids)
@click.option(
    *("--format", "form"),
    type=click.Choice(["markdown", "html", "json"]),
    metavar="markdown|html|json",
    default="markdown",
    help="File format [markdown].",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="New file [stdout]."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def export(session: str, form: str, output: Path | None, force: bool) -> None:
    """Write SESSION as Markdown, HTML or JSON.

    Markdown and HTML have the current branch, JSON all branches. The HTML page also has charts of the decode steps.
    """
    if output is not None and output.exists() and not force:
        raise UsageError(f"{output} exists already", "--force overwrites it")
    _export(session, form, output)


@sessions.command()
@click.argument("session", shell_complete=session_ids)
@click.argument("title")
@json_option
def rename(session: str, title: str, as_json: bool) -> None:
    """Set SESSION's title to TITLE."""
    with closing(SessionStore()) as store:
        renamed = store.rename(store.find(session).id, title)
    if as_json:
        print_json(asdict(renamed))
    else:
        click.echo(f"{renamed.id} renamed to {safe_line(renamed.title)}")


@sessions.command()
@click.argument("session", shell_complete=session_ids)
@click.option("--yes", is_flag=True, help="Delete without asking.")
@json_option
def rm(session: str, yes: bool, as_json: bool) -> None:
    """Delete SESSION with all branches. Exit code 1 if declined."""
    with closing(SessionStore()) as store:
        entry = store.find(session)
        if not yes:
            confirm(f"Delete {entry.id} ({safe_line(entry.title)})?", f"deleting {entry.id}")
        store.delete(entry.id)
    delete_kv_cache()
    if as_json:
        print_json({"deleted": entry.id})
    else:
        click.echo(f"deleted {entry.id}")


@sessions.command()
@click.argument("words", nargs=-1, required=True)
@click.option("-n", "--limit", type=click.IntRange(1), default=50, help="Maximum number of messages [50].")
@json_option
def search(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Find messages that contain all WORDS.

    Searches all branches. Exit code 1 if nothing is found.
    """
    with closing(SessionStore(to_read=True)) as store:
        hits = search_sessions(store, " ".join(words), limit)
    if as_json:
        print_json([asdict(hit) for hit in hits])
        return
    for hit in hits:
        click.echo(f"{hit.session_id}  {_when(hit.created_at)}  {hit.role:<9}  {safe_line(hit.snippet)}")
    if not hits:
        raise SessionError("nothing found")


@sessions.command()
@click.option(
    "--export",
    "output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="New file for everything readable.",
)
@json_option
def doctor(output: Path | None, as_json: bool) -> None:
    """List damaged conversations, and export readable ones as JSON. Changes nothing.

    Exit code 1 if something is damaged.
    """
    if output is not None and output.exists():
        raise UsageError(f"{output} exists already", "choose another name")
    with closing(SessionStore(to_read=True)) as store:
        examination = examine(store)
    if output is not None:
        write_output(
            output,
            json_text([to_document(readable.session, readable.messages) for readable in examination.sessions]) + "\n",
        )
    if as_json:
        print_json(_damage_document(examination))
    else:
        for line in _damage_lines(examination):
            click.echo(line)
        summary = _summary(examination)
        if output is not None:
            summary += f"; everything readable is in {output}"
        click.echo(summary)
    if examination.is_damaged:
        hint = None
        if output is None:
            hint = "`headrace sessions doctor --export FILE` saves everything readable"
        raise SessionError("some stored conversations are damaged", hint)


def _damage_document(examination: Examination) -> dict[str, object]:
    sessions = examination.sessions
    return {
        "problems": examination.problems,
        "conversations": len(sessions),
        "messages": sum(len(readable.messages) for readable in sessions),
        "damaged_sessions": {
            readable.session.id: readable.session.damaged for readable in sessions if readable.session.damaged
        },
        "damaged_messages": {str(message.id): message.damaged for _, message in _damaged_messages(examination)},
    }


def _damage_lines(examination: Examination) -> Iterator[str]:
    yield from map(safe_line, examination.problems)
    for readable in examination.sessions:
        if readable.session.damaged:
            yield f"session {safe_line(readable.session.id)}: {', '.join(readable.session.damaged)} damaged"
    for session, message in _damaged_messages(examination):
        yield f"session {safe_line(session)}, message {message.id}: {', '.join(message.damaged)} damaged"


def _damaged_messages(examination: Examination) -> list[tuple[str, Message]]:
    return [
        (readable.session.id, message)
        for readable in examination.sessions
        for message in readable.messages
        if message.damaged
    ]


def _summary(examination: Examination) -> str:
    """Return the number of readable conversations and messages, in words."""
    conversations = len(examination.sessions)
    messages = sum(len(readable.messages) for readable in examination.sessions)
    return f"{counted(conversations, 'conversation')} with {counted(messages, 'message')}"


def _export(name: str, form: str, output: Path | None) -> None:
    with closing(SessionStore(to_read=True)) as store:
        session = store.find(name)
        if form == "json":
            text = json_text(to_document(session, store.messages(session.id))) + "\n"
        else:
            text = page(store, session.id, form)
    if output is None:
        click.echo(text, nl=False)
        return
    write_output(output, text)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
