"""`headrace models verify`: installed files against their checksums. Exit code 1 on damage."""

from typing import Any

import click

from headrace.app.cli.completion import installed_names
from headrace.app.cli.say import print_json
from headrace.app.output.progress import drawn_progress
from headrace.app.output.sanitise import sanitise
from headrace.models.registry.checksums import content_problems, recorded_files
from headrace.models.registry.progress import Progress
from headrace.models.registry.resolve import installed_name
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError, HeadraceError
from headrace.runtime.metrics.units import format_bytes

_UNRECORDED = "not checked: installed without checksums (`headrace models rm` and `pull` add them)"


@click.command()
@click.argument("name", required=False, shell_complete=installed_names)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def verify(name: str | None, as_json: bool) -> None:
    """Compare installed files with their checksums.

    NAME: one model [all]. Exit code 1 on damage.
    """
    store = Store()
    names = [installed_name(name, store)] if name is not None else list(store.names())
    found = []
    for entry in names:
        with drawn_progress() as progress:
            found.append(_checked(store, entry, progress))
        if not as_json:
            click.echo(sanitise(_line(found[-1])))
    if as_json:
        print_json(found)
    elif not names:
        click.echo("no model is installed", err=True)
    damaged = [row["name"] for row in found if row["state"] == "damaged"]
    if damaged:
        hint = f"`headrace models rm {damaged[0]}` and `headrace models pull` install it again"
        raise CheckpointError(f"damaged: {', '.join(damaged)}", hint)


def _checked(store: Store, name: str, progress: Progress) -> dict[str, Any]:
    """Return {name, path, state: whole, damaged or unrecorded, files, bytes, problems}."""
    row: dict[str, Any] = {"name": name, "path": None, "state": "damaged", "files": 0, "bytes": 0, "problems": []}
    try:
        model = store.get(name)
    except HeadraceError as error:
        return {**row, "problems": [str(error)]}
    if model is None:
        return {**row, "problems": ["its files are missing"]}
    row["path"] = str(model.path)
    files = recorded_files(model.origin)
    if files is None:
        return {**row, "state": "unrecorded"}
    problems = content_problems(model.path, files, progress)
    size = sum(entry["bytes"] for entry in files.values())
    return {
        **row,
        "state": "damaged" if problems else "whole",
        "files": len(files),
        "bytes": size,
        "problems": problems,
    }


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "unrecorded":
        return f"{row['name']}: {_UNRECORDED}"
    if row["state"] == "damaged":
        return f"{row['name']}: DAMAGED: {'; '.join(row['problems'])}"
    return f"{row['name']}: whole ({row['files']} files, {format_bytes(row['bytes'])})"
