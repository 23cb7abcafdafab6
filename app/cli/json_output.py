"""JSON on standard output, the same way for every command: indented by two, ASCII, one document."""

import json
from typing import Any

import click


def json_text(document: Any) -> str:
    """As every command prints it. ASCII: text from models cannot drive a terminal, and any encoding can write it."""
    return json.dumps(document, indent=2)


def print_json(document: Any) -> None:
    """Write `document` and a newline."""
    click.echo(json_text(document))
