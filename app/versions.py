"""Installed versions and origin of headrace and its dependencies, from package metadata alone.

Every result document has `versions()`; `doctor` and hints use the rest. Nothing here imports a package it names.

Guard: tests/app/cli/test_doctor.py.
"""

import json
import platform
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGES = ("headrace", "mlx", "mlx-lm", "tokenizers")
NOT_INSTALLED = "source tree, not installed"
"""Version text of a headrace without metadata."""


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return versions by package name, python included; missing packages are left out."""
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def own_source() -> str:
    """Return pip's argument to reinstall headrace: its folder, file or repository.

    headrace is on no package index, so hints must not name one. Without metadata, the placeholder FOLDER_OF_HEADRACE.
    """
    try:
        recorded = json.loads(metadata.distribution("headrace").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        recorded = {}
    url = str(recorded.get("url", ""))
    if not url:
        return "FOLDER_OF_HEADRACE"
    if "vcs_info" in recorded:
        return f"{recorded['vcs_info'].get('vcs', 'git')}+{url}"
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else url


def shadowed() -> Path | None:
    """Return the folder of an installed headrace that the clone in the current folder hides, if any.

    Python prefers the current folder; a clone there has no kernels unless it was installed with -e.
    """
    try:
        installed = Path(str(metadata.distribution("headrace").locate_file("headrace")))
    except metadata.PackageNotFoundError:
        return None
    here = Path(__file__).parents[1]
    whole = (installed / "__init__.py").is_file()  # an editable install leaves at most the kernels there
    if not whole or installed.samefile(here):
        return None
    return installed
