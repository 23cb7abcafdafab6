"""JSON on standard output: indented by two, ASCII, one document."""

import json
from typing import Any

import click


def json_text(document: Any) -> str:
    """Return the document's text. ASCII cannot drive a terminal and fits any encoding."""
    return json.dumps(document, indent=2)


def print_json(document: Any) -> None:
    """Print `document` and a newline."""
    click.echo(json_text(document))
