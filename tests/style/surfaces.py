"""The texts people meet, as one file each: the help of every command, the errors that can be raised.

`python -m tests.style.surfaces` writes both files anew; their diff is what a review reads.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from inspect import cleandoc
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
HELP = Path(__file__).with_name("help.txt")
ERRORS = Path(__file__).with_name("errors.txt")


def help_texts() -> str:
    """Return the help of every command and option, independent of how click lays it out."""
    from headrace.app.cli.commands import cli

    return "\n".join(_helps(cli, "headrace"))


@cache
def error_texts() -> str:
    """Return the message and hint of every error that is raised, sorted by class; {...} stands for a value."""
    sources = [path.read_text(encoding="utf-8") for path in _sources()]
    classes = _error_classes(sources)
    a_call = re.compile(rf"\b(?:{'|'.join(classes)})\(")
    found: dict[str, set[str]] = {}
    for source in sources:
        if not a_call.search(source):  # parsing takes longer
            continue
        for call in ast.walk(ast.parse(source)):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in classes):
                continue
            parts = [text for argument in call.args if (text := _template(argument))]
            if parts:
                found.setdefault(call.func.id, set()).add("\n    ".join(parts))
    return "\n".join(f"{name}\n" + "".join(f"  {text}\n" for text in sorted(found[name])) for name in sorted(found))


def _helps(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    text = cleandoc(command.help or command.short_help or "")
    yield f"{path}\n" + "".join(f"  {line}".rstrip() + "\n" for line in text.replace("\b\n", "").splitlines())
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            names = ", ".join([*option.opts, *option.secondary_opts])
            yield f"  {names}{f' {option.metavar}' if option.metavar else ''}\n      {option.help}"
    yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _helps(below, f"{path} {name}")


def _sources() -> list[Path]:
    return sorted(path for layer in ("app", "models", "runtime") for path in (ROOT / layer).rglob("*.py"))


def _error_classes(sources: Sequence[str]) -> set[str]:
    """Return the names of HeadraceError and of every class derived from it, and click's two for wrong usage."""
    bases: dict[str, set[str]] = {}  # of every class
    for source in sources:
        for name, stated in re.findall(r"^ *class (\w+)\(([^)]*)\):", source, flags=re.MULTILINE):
            bases.setdefault(name, set()).update(re.findall(r"\w+", stated))
    known = {"HeadraceError"}
    while more := {name for name, of in bases.items() if of & known} - known:
        known |= more
    return known | {"BadParameter"}


def _template(node: ast.expr) -> str:
    """A string argument as written, with {names} for values; empty for any other argument."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return ""


def main() -> None:
    """Write both files."""
    HELP.write_text(help_texts(), encoding="utf-8")
    ERRORS.write_text(error_texts(), encoding="utf-8")


if __name__ == "__main__":
    main()
