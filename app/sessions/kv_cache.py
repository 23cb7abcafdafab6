"""Size and deletion of the KV disk cache (`app.engine.kv_disk_cache`), which contains deleted sessions' text.

Apart from it, since commands that only delete import no mlx.

Guard: tests/app/cli/test_sessions.py.
"""

from contextlib import suppress

from headrace.runtime.config.paths import kept_chats_dir


def kv_cache_bytes() -> int:
    """Return the size of the cache of all sessions."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in kept_chats_dir().iterdir())
    return 0


def delete_kv_cache() -> None:
    """Delete the cache of all sessions; its files do not name their session."""
    with suppress(OSError):
        for file in kept_chats_dir().iterdir():
            file.unlink()
