"""The hub's shared cache: its models and adapters, and deletion of revisions and of killed downloads' partial files.

See docs/workarounds.md.

Guard: tests/models/registry/test_fetch_hub.py.
"""

import glob
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.families import architecture_of
from headrace.models.checkpoint.adapter import CONFIG_FILE, WEIGHT_FILES, open_adapter
from headrace.models.checkpoint.safetensors import INDEX_FILE, MAX_INDEX_BYTES
from headrace.models.checkpoint.shard_header import read_strict_object
from headrace.models.checkpoint.split_files import first_parts, is_gguf, parts_of
from headrace.models.registry.hub_id import COMMIT, HubId
from headrace.models.registry.store import CachedFiles
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy

# A running download writes more often. Needed on file systems whose locks do not reach other machines.
_ABANDONED_S = 60.0


class CachedModel(Struct, frozen=True):
    """A model or an adapter in the hub's cache.

    name: org/name, with /FILE.gguf for a GGUF, and with @REVISION unless it is of the branch main.
    files: repository, commit, and the GGUF.
    path: the snapshot, or the GGUF in it.
    is_adapter: False for a model.
    """

    name: str
    files: CachedFiles
    path: Path
    is_adapter: bool

    def base(self) -> str | None:
        """Return the model that an adapter was made for; None if it does not say so.

        Raises CheckpointError and UnsupportedModelError for one that is broken or does more than headrace applies.
        """
        if self.files.file is None:
            return open_adapter(self.path).base
        from headrace.models.gguf.adapter import base_of_file  # late: numpy and MLX

        return base_of_file(self.path)


def cached_models() -> list[CachedModel]:
    """Return the language models and adapters that the hub's cache has complete, by name."""
    models = [model for snapshot in _snapshots() for model in _models_in(*snapshot)]
    return sorted(models, key=lambda model: model.name)


def cached_in(repo: str) -> list[CachedModel]:
    """Return the language models and adapters of a repository's branch main that the hub's cache has complete."""
    commit = _commit_of(_folder_of(repo) / "refs" / "main")
    if not commit:
        return []
    return list(_models_in(HubId(repo), _folder_of(repo) / "snapshots" / commit))


def _snapshots() -> Iterator[tuple[HubId, Path]]:
    """Yield the revisions that the hub's cache has by a name, with their folders."""
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*"):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        for ref in (folder / "refs").rglob("*"):
            commit = _commit_of(ref)
            if commit:
                revision = str(ref.relative_to(folder / "refs"))
                yield HubId(repo, None if revision == "main" else revision), folder / "snapshots" / commit


def _models_in(hub: HubId, folder: Path) -> Iterator[CachedModel]:
    """Yield the models of a snapshot: one, or an adapter, in files of safetensors, and each of its whole GGUFs."""
    commit = folder.name
    is_adapter = _is_adapter(folder)
    if is_adapter or _is_language_model(folder):
        yield CachedModel(str(hub), CachedFiles(hub.repo, commit), folder, is_adapter)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.[gG][gG][uU][fF]"))
    for name in first_parts(filter(is_gguf, names)):
        file = folder / name
        if all(part.is_file() for part in parts_of(file)):
            files = CachedFiles(hub.repo, commit, name)
            yield CachedModel(str(replace(hub, file=name)), files, file, _is_gguf_adapter(file))


def _is_adapter(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in WEIGHT_FILES)


def _is_gguf_adapter(file: Path) -> bool:
    from headrace.models.gguf.header import first_metadata  # late: numpy and gguf take half a second

    return first_metadata(file).get("general.type") == "adapter"


def _is_language_model(folder: Path) -> bool:
    """Return whether a snapshot has all weights, and the config, of a model that writes text."""
    if next(folder.glob("*.safetensors"), None) is None:
        return False
    try:
        config = read_strict_object(folder, "config.json")
        weight_map: object = {}
        if (folder / INDEX_FILE).is_file():
            weight_map = read_strict_object(folder, INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    except HeadraceError:
        return False
    shards = set(map(str, as_mapping(weight_map).values()))
    # Another program's download did not end. No `Path.is_file`: it fails at a name that is too long.
    if not all(os.path.isfile(folder / shard) for shard in shards):  # noqa: PTH113
        return False
    names = config.get("architectures")
    writes = isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)
    return writes or bool(architecture_of(config).name)


def _commit_of(ref: Path) -> str:
    """Return the commit that a branch's file names; nothing for a folder, or for a file that names none."""
    with suppress(OSError, ValueError):
        commit = ref.read_text(encoding="ascii").strip()
        if COMMIT.fullmatch(commit) is not None:
            return commit
    return ""


def cached_bytes(files: CachedFiles) -> int:
    """Return the bytes that deleting them would free; 0 if they are not cached."""
    if files.file is not None:
        return sum(blob.stat().st_size for blob in _unshared_blobs(files))
    strategy = _strategy(files)
    return strategy.expected_freed_size if strategy is not None else 0


def delete_cached(files: CachedFiles) -> int:
    """Delete a revision, or one GGUF with the other parts of its set; return the bytes freed.

    Contents that other revisions share stay.
    """
    if files.file is not None:
        blobs = _unshared_blobs(files)
        freed = sum(blob.stat().st_size for blob in blobs)
        for path in (*_links(files), *blobs):
            path.unlink(missing_ok=True)  # both are the same where the cache has no links
        return freed
    strategy = _strategy(files)
    if strategy is None:
        return 0
    strategy.execute()
    return strategy.expected_freed_size


def _folder_of(repo: str) -> Path:
    """Return a repository's folder, which has `snapshots`, `refs` and `blobs`."""
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _links(files: CachedFiles) -> list[Path]:
    """Return the snapshot's links to a GGUF and the other parts of its set."""
    folder = _folder_of(files.repo) / "snapshots" / files.commit
    if files.file is None or ".." in Path(files.file).parts:
        return []
    path = folder / files.file
    return [link for link in parts_of(path) if link.is_file()]


def _unshared_blobs(files: CachedFiles) -> list[Path]:
    """Return the contents of a GGUF, in the repository's folder, that no other file of its snapshots has."""
    folder = _folder_of(files.repo)
    links = _links(files)
    others = set(folder.glob("snapshots/**/*.[gG][gG][uU][fF]")) - set(links)
    blobs = {link.resolve() for link in links} - {other.resolve() for other in others}
    return sorted(blob for blob in blobs if blob.is_relative_to(folder.resolve()))


def _strategy(files: CachedFiles) -> "DeleteCacheStrategy | None":
    """Return the deletion of a whole revision; None if it is not cached."""
    from huggingface_hub import scan_cache_dir  # late, with its HTTP client: lists of models need neither
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    known = any(
        cached.repo_id == files.repo and revision.commit_hash == files.commit
        for cached in cache.repos
        for revision in cached.revisions
    )
    return cache.delete_revisions(files.commit) if known else None


def remove_leftovers(files: Iterable[Path]) -> None:
    """Delete partial downloads of these snapshot files, unless a running download has their lock."""
    from filelock import FileLock, Timeout

    for blob in (file.resolve() for file in files):
        # Each attempt of huggingface_hub starts a new file, named by the content's digest and a random suffix.
        beginnings = blob.parent.glob(f"{glob.escape(blob.name)}.*.incomplete")
        if not (abandoned := [path for path in beginnings if _is_abandoned(path)]):
            continue
        locks = blob.parents[2] / ".locks" / blob.parents[1].name  # of the repository
        # A download holds this lock until it completes. NotImplementedError: no locks on this file system.
        with (
            suppress(Timeout, OSError, NotImplementedError),
            FileLock(locks / f"{blob.name}.lock", timeout=0, mode=0o664),  # the mode that huggingface_hub uses
        ):
            for path in abandoned:
                path.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    """Return whether nothing has been written to a partial download for a while."""
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except FileNotFoundError:
        return False
