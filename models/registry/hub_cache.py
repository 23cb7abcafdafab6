"""Deleting a model from the hub's shared cache. Only whole revisions, through huggingface_hub's own bookkeeping."""

from typing import Any


def cached_bytes(repo: str, commit: str) -> int:
    """What deleting that revision would free; 0 if it is not cached."""
    strategy = _strategy(repo, commit)
    return int(strategy.expected_freed_size) if strategy is not None else 0


def delete_cached(repo: str, commit: str) -> int:
    """Delete that revision of `repo` from the hub cache; returns the bytes freed. Files other revisions share stay."""
    strategy = _strategy(repo, commit)
    if strategy is None:
        return 0
    strategy.execute()
    return int(strategy.expected_freed_size)


def _strategy(repo: str, commit: str) -> Any:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

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
