"""Size, origin and disk space of a model's download, before it starts.

Reads names, the catalog and the store; no network, no mlx.
"""

import shutil
from dataclasses import dataclass

from headrace.models.registry.catalog import HubRepo, load_catalog
from headrace.models.registry.resolve import DEFAULT_MODEL, stored_name
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError
from headrace.runtime.metrics.units import format_bytes


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """bytes: of the download; None if only the hub knows. free_bytes: on the store's disk."""

    name: str
    origin: str
    bytes: int | None
    free_bytes: int

    @property
    def download(self) -> str:
        """Size and origin: `2.12 GiB to download from org/name on the hub`."""
        if self.bytes is None:
            return f"from {self.origin}, size not known yet"
        return f"{format_bytes(self.bytes)} to download from {self.origin}"

    @property
    def room(self) -> str:
        """Disk space: `40 GiB free on the disk`, with `: not enough` if the download is larger."""
        free = f"{format_bytes(self.free_bytes)} free on the disk"
        return f"{free}: not enough" if self.bytes is not None and self.bytes > self.free_bytes else free


def download_plan(name: str | None) -> DownloadPlan | None:
    """Return the download of a model (None: the default); None if it is installed or a local path.

    Raises UsageError for an invalid name.
    """
    stored = stored_name(name or DEFAULT_MODEL)
    if stored is None:
        return None
    store = Store()
    try:
        if store.get(stored) is not None:
            return None
    except CheckpointError:  # reported when it is loaded
        return None
    at = next(path for path in (store.root, *store.root.parents) if path.exists())
    free = shutil.disk_usage(at).free
    entry = load_catalog().get(stored)
    if entry is None:
        return DownloadPlan(name or stored, "the hub", None, free)
    origin = f"{entry.source.repo} on the hub" if isinstance(entry.source, HubRepo) else entry.source.requirement
    return DownloadPlan(entry.name, origin, entry.download_bytes, free)
