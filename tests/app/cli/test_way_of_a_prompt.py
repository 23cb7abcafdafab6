"""ARCHITECTURE's ways: functions are in the files that it names, and a prompt passes them in its order."""

import ast
import functools
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from headrace.app.cli.run.command import run
from tests.support.pages import PAGES, ROOT
from tests.support.tiny_chat import write_chat_model


def rows(subject: str) -> list[tuple[list[str], list[str]]]:
    """Return the rows of the table of a way: files, and functions; the class is left out where the page leaves it out.

    A file without a folder is in the folder of the one before it.
    """
    section = re.search(rf"^## The way of {subject}\n(.*?)^## ", PAGES["ARCHITECTURE.md"], re.MULTILINE | re.DOTALL)
    assert section is not None
    table = []
    # A row: | `app/cli/run/command.py`, `answer.py` | `run`, `run_answer` | text |
    for where, functions in re.findall(r"^\| (`.*?) \| (`.*?) \|", section[1], re.MULTILINE):
        files: list[str] = []
        for name in re.findall(r"`([^`]+)`", where):
            files.append(name if "/" in name else str(Path(files[-1]).with_name(name)))
        table.append((files, re.findall(r"`([^`]+)`", functions)))
    return table


@functools.cache
def defined(file: str) -> set[str]:
    """Return the functions and classes of a file, each by its name and as `Class.method`."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("subject", ["a prompt", "an option", "a record"])
def test_tables_of_architecture_name_functions_of_their_files(subject: str) -> None:
    table = rows(subject)
    assert len(table) > 10
    for files, functions in table:
        assert set(functions) <= {name for file in files for name in defined(file)}
        assert all(defined(file) & set(functions) for file in files)


def test_a_prompt_calls_the_functions_listed_in_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    model = write_chat_model(tmp_path / "tiny")
    notes = tmp_path / "notes.txt"
    notes.write_text("Rivers")
    remaining = [function for _, functions in rows("a prompt") for function in functions]

    def watch(frame: FrameType, event: str, _: object) -> None:
        """Remove the next function of the page once it is called. The page may leave out the class of a method."""
        if remaining and event == "call" and f".{frame.f_code.co_qualname}".endswith(f".{remaining[0]}"):
            del remaining[0]

    sys.setprofile(watch)
    try:
        done = CliRunner().invoke(run, [f"Name three: @{notes}", "-m", str(model), "-n", "2"], catch_exceptions=False)
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0
    assert not remaining
