"""Decorators of any command: --json, and its arguments as one object.

Guard: tests/app/cli/test_commands.py.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import click

CommandFunction = Callable[..., object]
"""A command before or after a decorator: click calls it with keywords, and a decorator may take or add some."""
R = TypeVar("R")
T = TypeVar("T")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


def as_object(kind: Callable[..., T]) -> Callable[[Callable[[T], R]], Callable[..., R]]:
    """Return a decorator that passes a command's arguments as one object of `kind`.

    kind: a struct with a field for each parameter, named as click names it.
    """

    def decorate(command: Callable[[T], R]) -> Callable[..., R]:
        @wraps(command)
        def collected(**arguments: object) -> R:
            return command(kind(**arguments))

        return collected

    return decorate
