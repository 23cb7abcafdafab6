"""The hub's shared cache: its models and adapters, and deletion of revisions and of killed downloads' partial files.

See docs/workarounds.md.
"""

import glob
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import DeleteCacheStrategy, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from headrace.models.architectures.families import architecture_of
from headrace.models.checkpoint.adapter import CONFIG_FILE, WEIGHT_FILES
from headrace.models.checkpoint.shard_header import read_strict_object
from headrace.runtime.errors import HeadraceError

# A running download writes more often. Needed on file systems whose locks do not reach other machines.
_ABANDONED_S = 60.0


_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A model or an adapter in the hub's cache.

    name: org/name, with @REVISION unless it is of the branch main.
    repo: org/name.
    commit: that of the revision.
    folder: its snapshot.
    """

    name: str
    repo: str
    commit: str
    folder: Path


def cached_adapters() -> list[CachedRepo]:
    """Return the adapters in the folders of PEFT and mlx-lm that the hub's cache has, by name."""
    return [repo for repo in _cached_repos() if _is_adapter(repo.folder)]


def cached_models() -> list[CachedRepo]:
    """Return the language models in safetensors that the hub's cache has, by name."""
    return [repo for repo in _cached_repos() if not _is_adapter(repo.folder) and _is_language_model(repo.folder)]


def _cached_repos() -> list[CachedRepo]:
    """Return the revisions that the hub's cache has by a name, by that name."""
    repos = []
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*"):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        for ref in (folder / "refs").rglob("*"):
            commit = _commit_of(ref)
            if commit:
                revision = str(ref.relative_to(folder / "refs"))
                name = repo if revision == "main" else f"{repo}@{revision}"
                repos.append(CachedRepo(name, repo, commit, folder / "snapshots" / commit))
    return sorted(repos, key=lambda repo: repo.name)


def _is_adapter(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in WEIGHT_FILES)


def _is_language_model(folder: Path) -> bool:
    """Return whether a snapshot has weights and the config of a model that writes text."""
    if next(folder.glob("*.safetensors"), None) is None:
        return False
    try:
        config = read_strict_object(folder, "config.json")
    except HeadraceError:
        return False
    names = config.get("architectures")
    writes = isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)
    return writes or bool(architecture_of(config).name)


def _commit_of(ref: Path) -> str:
    """Return the commit that a branch's file names; nothing for a folder, or for a file that names none."""
    with suppress(OSError, ValueError):
        commit = ref.read_text(encoding="ascii").strip()
        if _COMMIT.fullmatch(commit) is not None:
            return commit
    return ""


def cached_bytes(repo: str, commit: str) -> int:
    """Return the bytes that deleting the revision would free; 0 if it is not cached."""
    strategy = _strategy(repo, commit)
    return strategy.expected_freed_size if strategy is not None else 0


def delete_cached(repo: str, commit: str) -> int:
    """Delete the revision from the hub cache and return the bytes freed. Files shared with other revisions stay."""
    strategy = _strategy(repo, commit)
    if strategy is None:
        return 0
    strategy.execute()
    return strategy.expected_freed_size


def _strategy(repo: str, commit: str) -> DeleteCacheStrategy | None:
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    known = any(
        cached.repo_id == repo and revision.commit_hash == commit
        for cached in cache.repos
        for revision in cached.revisions
    )
    return cache.delete_revisions(commit) if known else None


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
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    except FileNotFoundError:
        return False
