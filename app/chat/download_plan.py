"""Check of a model's name, and size, origin and disk space of its download or its copy, before it starts.

Reads names, the catalog and the store; no network, no mlx.

Guard: tests/app/chat/test_download_plan.py.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.models.checkpoint.split_files import is_gguf
from headrace.models.registry.adapters import find_adapter, split_adapter
from headrace.models.registry.catalog import find, load_catalog
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.progress import silent
from headrace.models.registry.resolve import DEFAULT_MODEL, find_source, names_on_disk, stored_name
from headrace.models.registry.source import CatalogName, LocalDirectory, LocalGGUF, parse_source, path_exists
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError
from headrace.runtime.metrics.units import format_bytes

if TYPE_CHECKING:
    from headrace.models.registry.import_gguf import OpenedGGUF


class DownloadPlan(Struct, frozen=True):
    """A download or a copy that a model needs before it runs.

    name: of the model.
    origin: where it comes from: a repository, a package, or the folder of a file.
    bytes: of the download; None if only the hub knows.
    free_bytes: on the store's disk.
    copy: a local .gguf file is converted; `bytes` are those of the conversion.
    """

    name: str
    origin: str
    bytes: int | None
    free_bytes: int
    copy: bool = False

    @property
    def verb(self) -> str:
        return "copy" if self.copy else "download"

    @property
    def fits(self) -> bool:
        """True if the disk has room, as far as the size is known."""
        return self.bytes is None or self.bytes <= self.free_bytes

    @property
    def download(self) -> str:
        """Size and origin: `2.12 GiB to download from org/name on the hub`."""
        if self.copy and self.bytes is not None:
            return f"{format_bytes(self.bytes)} to write into the store, since MLX reads GGUF weights in another order"
        if self.bytes is None:
            return f"from {self.origin}, size not known yet"
        return f"{format_bytes(self.bytes)} to download from {self.origin}"

    @property
    def room(self) -> str:
        """Disk space: `40 GiB free on the disk`, with `: not enough` if the download is larger."""
        free = f"{format_bytes(self.free_bytes)} free on the disk"
        if self.fits:
            return free
        return f"{free}: not enough"


def download_plan(name: str | None) -> DownloadPlan | None:
    """Return the download or the copy of a model (None: the default); None if it needs neither. Adapters are small.

    Raises UsageError for an invalid name, CheckpointError for an invalid .gguf file.
    """
    store = Store()
    base, _ = split_adapter(name or DEFAULT_MODEL)
    source = find_source(base, store)
    if isinstance(source, LocalGGUF):
        from headrace.models.registry.import_gguf import find_copy, open_gguf  # not imported for other models

        if find_copy(source.path, store) is not None:
            return None
        return copy_plan(base, source.path, open_gguf(source.path), store)
    if isinstance(source, LocalDirectory):
        return None
    stored = stored_name(str(source) if isinstance(source, HubId) else base)
    if stored is None:
        return None
    try:
        if store.get(stored) is not None:
            return None
    except CheckpointError:  # reported when it is loaded
        return None
    free = _free_bytes(store)
    entry = load_catalog().get(stored)
    if entry is None:
        return DownloadPlan(base, "the hub", None, free)
    if isinstance(entry.source, HubId):
        origin = f"{entry.source.repo} on the hub"
    else:
        origin = entry.source.requirement
    return DownloadPlan(entry.name, origin, entry.download_bytes, free)


def copy_plan(name: str, file: Path, opened: "OpenedGGUF", store: Store) -> DownloadPlan | None:
    """Return the copy of a .gguf file that the store does not have; None if the model runs from the file.

    name: given for the file, and shown for one without a suffix. Raises CheckpointError for an invalid file.
    """
    from headrace.models.registry.import_gguf import copy_bytes  # not imported for other models

    size = copy_bytes(opened.container)
    if not size:
        return None
    if is_gguf(file.name):
        name = file.name
    return DownloadPlan(name, str(file.parent), size, _free_bytes(store), copy=True)


def _free_bytes(store: Store) -> int:
    at = next(path for path in (store.root, *store.root.parents) if path.exists())
    return shutil.disk_usage(at).free


def check_model_name(name: str) -> None:
    """Accept an existing path, a catalog name, an installed model or the form of a hub id; `+ADAPTER` may follow.

    Raises UsageError for text of another form, ModelNotFoundError with the nearest names for an unknown name, and the
    errors of `find_adapter` for an adapter that the hub does not have to be asked for.
    """
    store = Store()
    base, adapter = split_adapter(name)
    source = find_source(base, store)
    if isinstance(source, CatalogName) and not store.has(source.name):
        find(source.name, lambda: names_on_disk(store))
    if adapter is not None and (path_exists(adapter) or not isinstance(parse_source(adapter), HubId)):
        find_adapter(adapter, silent, fetch=False)
