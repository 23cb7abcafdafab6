"""The versions that a figure depends on, read from package metadata without importing anything."""

import platform
from importlib import metadata

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
