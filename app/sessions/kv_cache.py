"""Size and deletion of the KV disk cache (`app.engine.kv_disk_cache`), which contains deleted sessions' text.

Apart from it, since commands that only delete import no mlx.

Guard: tests/app/cli/test_sessions.py.
"""

from contextlib import suppress

from headrace.runtime.config.paths import chats_cleared_file, kept_chats_dir
from headrace.runtime.errors import SessionError


def kv_cache_bytes() -> int:
    """Return the size of the cache of all sessions."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in kept_chats_dir().iterdir())
    return 0


def delete_kv_cache() -> None:
    """Delete the cache of all sessions; its files do not name their session.

    Raises SessionError if a file stays, after all others are deleted.
    """
    folder = kept_chats_dir()
    # First, so that an engine that is writing stops before the files are listed (`KVDiskCache.write`).
    with suppress(OSError):  # a cache that cannot be written gets no files, either
        folder.parent.mkdir(parents=True, exist_ok=True)
        chats_cleared_file().touch(mode=0o600)
    failed: OSError | None = None
    try:
        files = list(folder.iterdir())
    except FileNotFoundError:  # nothing was kept yet
        return
    except OSError as error:
        files = []
        failed = error
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            failed = error
    if failed is not None:
        text = f"K/V on disk, with the text of conversations, cannot be deleted: {failed.strerror}"
        raise SessionError(text, f"delete the files in {folder}") from failed
