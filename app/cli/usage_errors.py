"""Message and hint for a wrong command line, from click's error.

click states what is wrong; the hint is the first of these that applies: headrace's option for another program's, the
subcommand that was meant, a forgotten -m before a model's name, and --help. The words of other programs are in
`aliases.py`.

Guard: tests/app/cli/test_commands.py.
"""

import re

import click

from headrace.app.cli import completion
from headrace.app.cli.aliases import hint_for_option, hint_for_value, suggested_subcommand
from headrace.runtime.errors import HeadraceError

_EXTRA_ARGUMENT = re.compile(r"unexpected extra argument \((\S+)\)", re.IGNORECASE)  # click's text
_DOCUMENTS = (".json", ".jsonl", ".txt", ".md")  # no models, though `notes/a.md` has the form of a hub id


def usage_error(error: click.UsageError) -> tuple[str, str]:
    """Return the message and the hint for a wrong command line."""
    command = "headrace"
    if error.ctx is not None:
        command = error.ctx.command_path
    if isinstance(error, click.NoSuchOption):
        hint = hint_for_option(error.option_name, command)
        if hint:
            return f"no such option '{error.option_name}'", hint
    if isinstance(error, click.BadParameter) and error.param is not None:
        hint = hint_for_value(error.param.opts[-1], command)
        if hint:
            return click_text(error), hint
    word = getattr(error, "command_name", None)  # of click.NoSuchCommand, which older versions do not have
    if isinstance(word, str) and error.ctx is not None and isinstance(error.ctx.command, click.Group):
        near = suggested_subcommand(word, error.ctx.command.commands)
        if near:
            return f"no such command {word!r:.80}", f"did you mean {command} {near}?"
    if not isinstance(word, str):
        extra = _EXTRA_ARGUMENT.search(error.message)
        word = extra and extra[1]
    if isinstance(word, str) and error.ctx is not None and _names_model(word, error.ctx):
        return click_text(error), f"a model goes after -m: {command} -m {word}"
    return click_text(error), f"`{command} --help` shows the options"


def _names_model(word: str, ctx: click.Context) -> bool:
    """Return whether a command takes a model as an option, and a word is one by its looks or its name."""
    option = next((param for param in ctx.command.params if "-m" in param.opts), None)
    if option is None or ("/" in word and ctx.command.name == "batch"):  # there it is the file of results
        return False
    from headrace.models.registry.catalog import respelled  # late: reads the catalog

    known = respelled(word) is not None or word in completion.installed_names(ctx, option, word)
    return known or _looks_like_model(word)


def _looks_like_model(word: str) -> bool:
    """Return whether a word is the name of a .gguf file, a model's folder, or like a hub id and no file's name."""
    from headrace.models.registry.hub_id import parse_hub_id
    from headrace.models.registry.source import path_exists

    if word.lower().endswith(".gguf") or ("/" in word and path_exists(f"{word}/config.json")):
        return True
    if word.count("/") != 1 or word.lower().endswith(_DOCUMENTS) or path_exists(word):
        return False
    try:
        parse_hub_id(word)
    except HeadraceError:
        return False
    return True


def click_text(error: click.ClickException) -> str:
    """Return click's message in the form of headrace's: no capital, no full stop."""
    text = " ".join(error.format_message().split()).removesuffix(".")
    return text[:1].lower() + text[1:]
