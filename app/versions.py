"""The versions that a figure depends on, read from package metadata without importing anything."""

import json
import platform
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGES = ("headrace", "mlx", "mlx-lm", "tokenizers")
NOT_INSTALLED = "source tree, not installed"
"""Said of headrace where it has no metadata."""


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package name -> version, python included; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def own_source() -> str:
    """What pip takes to install headrace again: the folder, file or repository that it was installed from.

    It is on no package index, so no command may name it there. In words where the metadata does not say.
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
    """The folder of the installed headrace where another one runs: Python looks into the folder it is started in first,
    and a clone has one, without kernels unless it was installed with -e."""
    try:
        installed = Path(str(metadata.distribution("headrace").locate_file("headrace")))
    except metadata.PackageNotFoundError:
        return None
    here = Path(__file__).parents[1]
    whole = (installed / "__init__.py").is_file()  # -e leaves the kernels alone there, if anything
    return installed if whole and not installed.samefile(here) else None
