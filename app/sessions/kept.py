"""K/V of recent chats on disk (`app.engine.kept_chats`) hold what was said: what is deleted must not stay there."""

from contextlib import suppress

from headrace.runtime.config.paths import kept_chats_dir


def forget_kept_chats() -> None:
    """Delete those of all chats, since their files do not say whose they are. They can be computed again."""
    with suppress(OSError):
        for file in kept_chats_dir().iterdir():
            file.unlink()
