"""What the README tells people to type: every command parses, every option and file it names exists, lines fit."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from headrace.app.cli.commands import cli
from tests.test_house import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COLUMNS = 120


def commands() -> list[str]:
    """Every headrace command, of the shell blocks and of the text, without what is piped into it."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    typed = [part for line in lines for part in re.split(r"\s(?:&&|\|)\s", line)]
    typed += re.findall(r"`((?:[A-Z_]+=\w+ )*headrace[^`]*)`", README)
    stripped = [re.sub(r"^(?:[A-Z_]+=\w+ )+", "", command) for command in typed]
    return [command for command in stripped if re.match(r"(?:\S*/)?headrace\b", command)]


def subcommands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from subcommands(command)


def test_there_is_something_to_check() -> None:
    assert len(commands()) >= 10
    assert len(workflow_commands()) >= 4


def workflow_commands() -> list[str]:
    """Every headrace command of the workflows."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / ".github/workflows").glob("*.yml")]
    return [
        line for text in texts for line in re.findall(r"^\s+(?:caffeinate -i )?(headrace [^>\n]+)", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("line", [*commands(), *workflow_commands()])
def test_every_command_parses(line: str) -> None:
    """As click would parse it on the way to running it; unknown options and impossible values raise."""
    arguments = shlex.split(line, comments=True)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="headrace")
    while isinstance(command, click.Group):
        if not arguments or arguments[0].startswith("-"):
            break
        found = command.get_command(context, arguments[0])
        if found is None and command is not cli:
            break
        assert found is not None, arguments[0]
        command, arguments = found, arguments[1:]
    command.make_context("headrace", arguments)


def test_every_option_named_exists() -> None:
    known = {"--help"}
    for command in (cli, *subcommands(cli)):
        known |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    named = {
        word for code in re.findall(r"`([^`\n]+)`", README) for word in re.findall(r"(?<!\S)--?[a-z][a-z-]*", code)
    }
    of_others = {"-m"} if "`python -m" in README else set()
    assert named - of_others <= known
    assert named


def test_every_variable_that_is_read_is_named() -> None:
    sources = [file for layer in ("app", "models", "runtime") for file in (ROOT / layer).rglob("*.py")]
    read = {name for file in sources for name in re.findall(r"HEADRACE_[A-Z]+", file.read_text(encoding="utf-8"))}
    assert read == set(re.findall(r"HEADRACE_[A-Z]+", README))


GUIDES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")
ROOTS = ("app", "models", "runtime", "assets", "docs", "tests", "headrace")


def paths_in(text: str) -> set[str]:
    """Every link, module to run and path in backticks; a `*` in a path has to match something."""
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    named = [name.replace(".", "/") for name in re.findall(r"`python -m ([\w.]+)`", text)]
    modules = [f"{name}/__main__.py" if (ROOT / name).is_dir() else f"{name}.py" for name in named]
    return {*linked, *modules, *re.findall(rf"`((?:{'|'.join(ROOTS)}|\.\w+)/[\w./*-]*)`", text)}


@pytest.mark.parametrize("file", GUIDES)
def test_every_file_named_exists(file: str) -> None:
    named = paths_in((ROOT / file).read_text(encoding="utf-8"))
    assert len(named) >= 5
    assert [name for name in sorted(named) if not list(ROOT.glob(name.rstrip("/")))] == []


def test_every_folder_of_the_layers_is_explained() -> None:
    """A new folder, and a newcomer does not find it."""
    named = paths_in((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    for layer in ("app", "models", "runtime"):
        folders = {path.parent for path in (ROOT / layer).glob("*/*.py")}
        assert {f"{layer}/{folder.name}/" for folder in folders} <= named


def test_folders_named_below_another_exist() -> None:
    """`screens/` in the row of `app/tui/`."""
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| `([\w/]+)/` \| .*`\w+/`", line):
            for below in re.findall(r"`(\w+)/`", line):
                assert (ROOT / row[1] / below).is_dir(), f"{row[1]}/{below}"


def test_the_protocols_are_where_the_architecture_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    assert rows
    for name, file in rows:
        assert re.search(rf"^class {name}\(Protocol\b", (ROOT / file).read_text("utf-8"), re.MULTILINE), name


@pytest.mark.parametrize("file", GUIDES)
def test_lines_fit(file: str) -> None:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS] == []
