"""Deletion from the hub's shared cache: whole revisions, and partial files of killed downloads.

See docs/workarounds.md.
"""

import glob
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from huggingface_hub import DeleteCacheStrategy, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

# A running download writes more often. Needed on file systems whose locks do not reach other machines.
_ABANDONED_S = 60.0


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
