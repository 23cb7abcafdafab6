"""Command-line options of an answer, from the table of `app.answer.options`.

A new type of value (`runtime/config/value_types.py`) needs its case in `answer_option`; a new option of a known type
needs nothing here.

Guards: tests/app/cli/test_commands.py, and test_run_settings.py for values and their errors.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from headrace.app.answer.options import OPTIONS, AnswerOptions, ThinkingValue
from headrace.app.cli.decorators import CommandFunction
from headrace.app.config.bounded_input import is_schema, read_grammar_file
from headrace.models.text.thinking import LEVELS
from headrace.runtime.config.value_types import (
    JSONObject,
    JSONSchema,
    LogitBias,
    OneOf,
    Text,
    TextFile,
    Texts,
    Whole,
)
from headrace.runtime.errors import UsageError


def answer_options(command: CommandFunction) -> CommandFunction:
    """Add an option for every row of the table; the command receives them as `options`, an `AnswerOptions`."""

    @wraps(command)
    def with_options(**arguments: object) -> object:
        given = {name: arguments.pop(name) for name in OPTIONS}
        return command(options=read_options(given), **arguments)

    decorated: CommandFunction = with_options
    for name in reversed(list(OPTIONS)):  # of click's decorators the one applied last comes first in the help
        decorated = answer_option(name)(decorated)
    return decorated


def answer_option(name: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the click option of one row of the table."""
    row = OPTIONS[name]
    declared = [_flag(name)]
    if row.short:
        declared.insert(0, row.short)
    help = f"{row.help}."
    if row.default:
        help = f"{row.help} [{row.default}]."
    match row.kind:  # a class before those that it is a kind of: TextFile is a Text, TokenLimit a Whole
        case ThinkingValue():
            return click.option(*declared, metavar="|".join(("off", "on", *LEVELS, "N")), help=help)
        case Texts():
            return click.option(*declared, multiple=True, metavar="TEXT", help=f"{help} Repeatable.")
        case LogitBias():
            return click.option(*declared, multiple=True, metavar="ID=VALUE", help=f"{help} Repeatable.")
        case OneOf(names):
            return click.option(*declared, type=click.Choice(names), metavar="|".join(names), help=help)
        case JSONSchema():
            return click.option(*declared, metavar="FILE|JSON", help=help)
        case JSONObject():
            return click.option(*declared, metavar="JSON", help=help)
        case TextFile():
            return click.option(*declared, metavar="FILE", help=help)
        case Text():  # of the options only the regular expression
            return click.option(*declared, metavar="REGEX", help=help)
        case Whole():
            return click.option(*declared, type=int, help=help)
        case _:
            return click.option(*declared, type=float, help=help)


def read_options(given: Mapping[str, Any]) -> AnswerOptions:
    """Return the options that were given. Raises UsageError that names the flag."""
    values = {name: value for name, value in given.items() if value is not None and value != ()}
    if "stop" in values:
        values["stop"] = list(values["stop"])  # as JSON writes it, for errors
    if "logit_bias" in values:
        values["logit_bias"] = dict(map(_bias, values["logit_bias"]))
    for name, value in values.items():
        kind = OPTIONS[name].kind
        if isinstance(kind, TextFile) or (isinstance(kind, JSONSchema) and not is_schema(value)):
            values[name] = read_grammar_file(value)
    return AnswerOptions.read(values, shown_as=_flag)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UsageError(f"--logit-bias must be ID=VALUE, not {text!r}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
