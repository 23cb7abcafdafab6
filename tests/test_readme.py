"""README and guides: every command parses, every option, file and link exists, lines fit, figures match the data."""

import contextlib
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from headrace.app.cli.commands import cli
from tests.support.pages import PAGES, blocks
from tests.test_house import ROOT

GUIDES = ("README.md", "docs/cli.md", "docs/chat.md", "docs/models.md", "docs/mac.md", "docs/troubleshooting.md")
VALUES = {"BITS": "4", "P": "0.5"}  # for numbers that a page names in capitals
README_LINES = 120
COLUMNS = 120


def commands() -> list[str]:
    """Return every headrace command in all pages' shell blocks and text, without pipes."""
    return [command for page in PAGES for command in commands_in(page)]


def commands_in(page: str) -> list[str]:
    lines = [line for block in blocks(page, "sh") for line in commands_of(block)]
    typed = [part for line in lines for part in re.split(r"\s(?:&&|\||>)\s", line)]
    typed += re.findall(r"`((?:[A-Z_]+=\w+ )*headrace(?: [^`]*)?)`", PAGES[page])
    stripped = [re.sub(r"^(?:[A-Z_]+=\w+ )+", "", command) for command in typed]
    return [command for command in stripped if re.match(r"(?:\S*/)?headrace\b", command)]


def commands_of(block: str) -> list[str]:
    """Return the commands of a block: lines, joined where a quote is open."""
    commands: list[str] = []
    begun = ""
    for line in block.splitlines():
        begun = f"{begun} {line}".strip()
        if re.sub(r"\s#.*", "", begun).count("'") % 2 == 0:
            commands.append(begun)
            begun = ""
    assert begun == ""
    return commands


def subcommands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from subcommands(command)


def test_documents_and_workflows_have_commands() -> None:
    assert len(commands()) >= 10
    assert len(workflow_commands()) >= 4


def workflow_commands() -> list[str]:
    """Every headrace command of the workflows."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / ".github/workflows").glob("*.yml")]
    return [
        line for text in texts for line in re.findall(r"^\s+(?:caffeinate -i )?(headrace [^>\n]+)", text, re.MULTILINE)
    ]


def test_every_command_parses() -> None:
    for line in [*commands(), *workflow_commands()]:
        try:
            parse(line)
        except Exception as error:
            raise AssertionError(line) from error


def parse(line: str) -> None:
    """Parse a command as click would on the way to running it. Raises for unknown options and impossible values."""
    arguments = [VALUES.get(word, word) for word in shlex.split(line, comments=True)[1:]]
    command: click.Command = cli
    context = click.Context(cli, info_name="headrace")
    while isinstance(command, click.Group):
        if not arguments or arguments[0].startswith("-"):
            break
        found = command.get_command(context, arguments[0])
        if found is None and (command is not cli or " " in arguments[0]):  # a prompt without a command
            break
        assert found is not None, arguments[0]
        command = found
        arguments = arguments[1:]
    if arguments:  # else a command's name in a sentence
        with contextlib.suppress(click.exceptions.Exit):  # of --help and --version
            command.make_context("headrace", arguments)


PROGRAMS = {"headrace", "python", "python3", "python3.14", "pip", "pytest", "run"}  # the last is .ci/run
PROGRAMS |= {"uv", "git", "brew", "mlx.distributed_config", "echo", "cat", "cp", "rm", "eval", "sudo", "tmutil"}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_shell_hold_commands_alone(page: str) -> None:
    """No output and no placeholder stands among them: a block can be pasted as it is."""
    for block in blocks(page, "sh"):
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
        for command in commands_of(block):
            for part in re.split(r" (?:&&|\|) ", re.sub(r"(^|\s)#.*", "", command)):
                words = [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=", word)]
                assert not words or Path(words[0]).name in PROGRAMS, part


def test_every_other_block_is_run_by_a_test() -> None:
    """A new block of Python or JSON is added to a test that runs it, then here."""
    run = {"README.md": 1, "docs/python.md": 2, "docs/structured.md": 1}  # by tests of the Python API
    run |= {"docs/server.md": 1, "docs/hosts.md": 1}  # by those of the server's clients, and of hostfiles
    found = {page: len(blocks(page, "(?!sh\n)\\w+")) for page in PAGES}
    assert {page: count for page, count in found.items() if count} == run


def test_every_option_named_exists() -> None:
    known = {"--help"}
    for command in (cli, *subcommands(cli)):
        known |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    named = {
        word
        for name in GUIDES
        for code in re.findall(r"`([^`\n]+)`", PAGES[name])
        if not re.match(r"python|\S*pip |uv |sudo |kill ", code)
        for word in re.findall(r"(?<!\S)--?[a-z][a-z-]*", code)
    }
    assert named <= known
    assert len(named) >= 20


def test_every_variable_that_is_read_is_documented() -> None:
    sources = [file for layer in ("app", "models", "runtime") for file in (ROOT / layer).rglob("*.py")]
    read = {
        name for file in sources for name in re.findall(r"(?<!_)HEADRACE(?:_[A-Z]+)+", file.read_text(encoding="utf-8"))
    }
    assert read == set(re.findall(r"^\| `(HEADRACE(?:_[A-Z]+)+)`", PAGES["docs/cli.md"], re.MULTILINE))
    assert set(re.findall(r"(?<!define\.)HEADRACE(?!_TEST)(?:_[A-Z]+)+", "".join(PAGES.values()))) <= read


LINK = r"\]\((?!https?:)([^)#]+)"
ROOTS = ("app", "models", "runtime", "assets", "docs", "tests", "headrace")


def paths_in(text: str) -> set[str]:
    """Return every module to run and path in backticks; a `*` in a path has to match something."""
    named = [name.replace(".", "/") for name in re.findall(r"`python -m ([\w.]+)`", text)]
    modules = [f"{name}/__main__.py" if (ROOT / name).is_dir() else f"{name}.py" for name in named]
    return {*modules, *re.findall(rf"`((?:{'|'.join(ROOTS)}|\.ci|\.github)/[\w./*-]*)`", text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_exists(page: str) -> None:
    linked = {f"{Path(page).parent}/{name}" for name in re.findall(LINK, PAGES[page])}
    named = linked | paths_in(PAGES[page])
    assert [name for name in sorted(named) if not list(ROOT.glob(os.path.normpath(name)))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_heading_linked_exists(page: str) -> None:
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", PAGES[page]):
        target = os.path.normpath(Path(page).parent / file) if file else page
        headings = re.findall(r"^#+ (.*)", PAGES[target], re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_lists_every_page() -> None:
    linked = {Path(name).name for name in re.findall(LINK, PAGES["docs/index.md"])}
    assert {Path(page).name for page in PAGES} <= linked | {"index.md"}


def test_the_readme_fits_a_page() -> None:
    assert len(PAGES["README.md"].splitlines()) <= README_LINES


def test_tables_of_benchmarks_match_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    save = Figure.savefig
    written: list[Path] = []

    # Each plot is made; laying it out and writing it takes most of the time, so only the first is written.
    def save_first(figure: Figure, file: Path, **how: Any) -> None:
        if written:
            file.touch()
        else:
            save(figure, file, **how)
        written.append(file)

    monkeypatch.setattr(Figure, "savefig", save_first)
    render = runpy.run_path(str(ROOT / "docs/benchmarks/render.py"))
    page = PAGES["docs/benchmarks.md"]
    assert render["rendered"](page) == page
    assert set(re.findall(r"<!-- table ([\w-]+) -->", page)) == set(render["tables"]())
    drawn = {file.name for file in render["draw"](tmp_path)}
    assert drawn == {file.name for file in (ROOT / "docs/benchmarks").glob("*.svg")}
    assert "<svg" in written[0].read_text(encoding="utf-8")


def test_every_figure_of_the_readme_is_in_benchmarks() -> None:
    section = PAGES["README.md"].partition("## Why headrace")[2].partition("## Commands")[0]
    figures = set(re.findall(r"\d[\d,.]*\d(?=x| %| tok/s| times)|\d+ of \d+", section))
    assert len(figures) >= 12
    assert {figure for figure in figures if not re.search(rf"(?<![\d.]){figure}", PAGES["docs/benchmarks.md"])} <= {
        "2.1", "3.0", "3.9"  # of 2.07x, 3.04x and 3.89x
    }  # fmt: skip


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


def test_protocols_stand_in_the_files_that_architecture_names() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    assert rows
    for name, file in rows:
        assert re.search(rf"^class {name}\((\w+, )?Protocol\b", (ROOT / file).read_text("utf-8"), re.MULTILINE), name


def test_the_step_in_architecture_is_the_engines() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    source = (ROOT / "runtime/engine/engine.py").read_text("utf-8")
    block = page[page.index("    def step(self):") : page.index("A batch (`in_flight.py`)")]
    for line in block.splitlines():
        code = line.partition("#")[0].strip()
        shown = code.partition("(")[0] if code.startswith("def ") else code.replace("...", "")
        assert shown in source, line


@pytest.mark.parametrize("page", [*GUIDES, "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/index.md", "docs/python.md"])
def test_lines_fit(page: str) -> None:
    assert [number for number, line in enumerate(PAGES[page].splitlines(), 1) if len(line) > COLUMNS] == []
