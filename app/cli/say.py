"""Sanitised lines on standard output and error."""

import click

from headrace.app.output.sanitise import sanitise


def say(text: str, *, err: bool = False) -> None:
    """Print `text` and a newline."""
    click.echo(sanitise(text), err=err)
