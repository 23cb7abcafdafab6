"""The work of `headrace models verify`: the files of an installed model, compared with their recorded checksums.

Guard: tests/app/cli/test_models.py.
"""

from typing import Literal

from msgspec import Struct

from headrace.models.registry.checksums import content_problems, recorded_files
from headrace.models.registry.progress import Progress
from headrace.models.registry.store import Store
from headrace.runtime.errors import HeadraceError
from headrace.runtime.metrics.units import format_bytes

_UNRECORDED = "not checked: installed without checksums (`headrace models rm` and `pull` add them)"


class VerifiedModel(Struct):
    """The state of a model's files.

    state: whole: all checksums are right; unrecorded: the model was installed without checksums.
    problems: of damaged files, or the reason why the model cannot be read.
    """

    name: str
    path: str | None = None  # None without files
    state: Literal["whole", "damaged", "unrecorded"] = "damaged"
    files: int = 0
    bytes: int = 0
    problems: list[str] = []


def verify_model(store: Store, name: str, progress: Progress) -> VerifiedModel:
    """Read all files of the installed model `name`."""
    try:
        model = store.get(name)
    except HeadraceError as error:
        return VerifiedModel(name, problems=[str(error)])
    if model is None:
        return VerifiedModel(name, problems=["its files are missing"])
    path = str(model.path)
    files = recorded_files(model.origin)
    if files is None:
        return VerifiedModel(name, path, "unrecorded")
    problems = content_problems(model.path, files, progress)
    size = sum(entry["bytes"] for entry in files.values())
    state: Literal["whole", "damaged"] = "whole"
    if problems:
        state = "damaged"
    return VerifiedModel(name, path, state, len(files), size, problems)


def verified_line(row: VerifiedModel) -> str:
    """Return the outcome as a line."""
    if row.state == "unrecorded":
        return f"{row.name}: {_UNRECORDED}"
    if row.state == "damaged":
        return f"{row.name}: DAMAGED: {'; '.join(row.problems)}"
    return f"{row.name}: whole ({row.files} files, {format_bytes(row.bytes)})"
