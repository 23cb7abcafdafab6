"""Lines for people: whatever name, title or path of somebody else's is in them, they do nothing to a terminal."""

import click

from headrace.app.output.sanitise import sanitise


def say(text: str, *, err: bool = False) -> None:
    """Print `text` and a newline."""
    click.echo(sanitise(text), err=err)
