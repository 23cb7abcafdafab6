"""The tables of `headrace models list`: installed models and the catalog, models of other programs, adapters.

Rows are documents of `app.model_info.model_report`, as `models list --json` prints them. A new column reads a key
there. Names and licences come from downloaded files, so cells are printed as `safe_line`.

Guards: tests/app/cli/test_models.py; tests/app/output/test_tables.py for narrow terminals.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import click

from headrace.app.model_info.kv_fits import fits_short
from headrace.app.model_info.model_report import MEMORY_CONTEXT
from headrace.app.output.document import Document
from headrace.app.output.sanitise import safe_line
from headrace.app.output.tables import Column, print_table
from headrace.app.predict.uses import STAR, legend
from headrace.runtime.metrics.units import format_bytes, format_context

T = TypeVar("T")


def print_models(rows: list[Document], foreign: list[Document], adapters: list[Document]) -> None:
    """Print a table for each kind that has rows, with a blank line between two.

    rows: of `overview`, installed models and the catalog, with `recommended_for`.
    foreign: of `foreign_documents`, models of other programs.
    adapters: of `adapter_documents`.
    """
    if rows:
        _print_overview(rows)
    if foreign:
        if rows:
            click.echo()
        click.echo("ELSEWHERE ON THIS DISK, run by these names:")
        print_table(_foreign_columns(foreign), rule=False)
    if adapters:
        if rows or foreign:
            click.echo()
        click.echo("ADAPTERS in the hub's cache, run after a model: -m MODEL+NAME")
        print_table(_adapter_columns(adapters), rule=False)
        _print_problems(adapters)


def _print_overview(rows: list[Document]) -> None:
    print_table(_columns(rows), rule=False)
    _print_problems(rows)
    click.echo(f"\nMEMORY: weights, KV cache of {format_context(MEMORY_CONTEXT)} tokens, and the program itself.")
    if any(row["context_fits"] for row in rows):
        click.echo("FITS: tokens of context in the memory free now, by K/V format (--kv).")
    if stars := legend({row["name"]: row["recommended_for"] for row in rows}):
        click.echo(stars)


def _print_problems(rows: list[Document]) -> None:
    for row in rows:
        if problem := row.get("problem"):
            click.echo(safe_line(f"{row['name']}: {problem}"))


def _columns(rows: list[Document]) -> list[Column]:
    def column(name: str, leaves: int, cell: Callable[[Document], str], *, right: bool = False) -> Column:
        """Make a column of clean texts. leaves: see `Column`."""
        return Column.of(rows, name, lambda row: safe_line(cell(row)), leaves, right=right)

    return [
        column("NAME", 0, _marked_name),
        column("SIZE", 1, _size, right=True),
        column("MEMORY", 0, lambda row: _or_dash(row["memory_bytes"], format_bytes), right=True),
        column("CONTEXT", 3, lambda row: _or_dash(row["context"], format_context), right=True),
        column(f"FITS {'/'.join(_formats(rows))}", 5, lambda row: fits_short(row["context_fits"], row["context"])),
        column("FORMAT", 4, lambda row: _or_dash(row["quantization"], str)),
        column("LICENCE", 6, lambda row: _or_dash(row["licence"], str)),
        column("", 2, _state),
    ]


def _foreign_columns(rows: list[Document]) -> list[Column]:
    return [
        Column.of(rows, "NAME", lambda row: safe_line(row["name"]), 0, right=False),
        Column.of(rows, "SIZE", lambda row: format_bytes(row["disk_bytes"]), 1, right=True),
        Column.of(rows, "OF", lambda row: row["program"], 2, right=False),
        Column.of(rows, "FOLDER", lambda row: safe_line(_folder(row)), 3, right=False),
    ]


def _adapter_columns(rows: list[Document]) -> list[Column]:
    return [
        Column.of(rows, "NAME", lambda row: safe_line(row["name"]), 0, right=False),
        Column.of(rows, "SIZE", lambda row: format_bytes(row["disk_bytes"]), 1, right=True),
        Column.of(rows, "MADE FOR", lambda row: safe_line(row["made_for"] or "not stated"), 2, right=False),
        Column.of(rows, "FOLDER", lambda row: safe_line(_folder(row)), 3, right=False),
    ]


def _formats(rows: list[Document]) -> list[str]:
    """Return the K/V formats of the row with most of them."""
    return max((list(row["context_fits"] or ()) for row in rows), key=len, default=[])


def _typed_name(row: Document) -> str:
    """Return the name as `-m` takes it; the store calls a hub repository org--name."""
    if "--" in row["name"] and "/" in row["title"]:
        return str(row["title"])
    return str(row["name"])


def _marked_name(row: Document) -> str:
    """Return the name with its marks: the default, a recommended model."""
    name = _typed_name(row)
    if row["default"]:
        name += " (default)"
    if row["recommended_for"]:
        name += f" {STAR}"
    return name


def _state(row: Document) -> str:
    if row.get("problem"):
        return "broken"
    if copied := row.get("copy_of"):
        return f"copy of {Path(copied).name}"
    if file := row.get("runs_from"):
        return f"runs {Path(file).name}"
    if row["installed"]:
        return "installed"
    return ""


def _size(row: Document) -> str:
    if row["installed"]:
        return format_bytes(row["disk_bytes"])
    return format_bytes(row["download_bytes"])


def _folder(row: Document) -> str:
    """Return the folder of a model or an adapter, that of the repository in the hub's cache, with ~ for the home."""
    path = Path(row["path"])
    folder = path if path.is_dir() else path.parent
    repository = next((parent for parent in folder.parents if parent.name.startswith("models--")), folder)
    with suppress(RuntimeError, ValueError):  # no home, or outside of it
        return f"~/{repository.relative_to(Path.home())}"
    return str(repository)


def _or_dash(value: T | None, text: Callable[[T], str]) -> str:
    return "-" if value is None else text(value)
