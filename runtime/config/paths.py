"""Where headrace keeps its files: model store, caches, settings.

Platform directories by default; HEADRACE_HOME=DIR puts everything under one folder (tests, portable setups).
Nothing is created here: whoever writes creates its folder. UsageError if HEADRACE_HOME cannot be a folder.
"""

from pathlib import Path

from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def _under_home(kind: str) -> Path | None:
    home = environment.home()
    if not home:
        return None
    try:
        path = Path(home).expanduser()
        usable = next(place for place in (path, *path.absolute().parents) if place.exists()).is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, not to be looked at
        usable = False
    if not usable:
        raise UsageError(f"HEADRACE_HOME is not a folder: {home}")
    return path / kind


def data_dir() -> Path:
    """Models and sessions: large or irreplaceable."""
    if (path := _under_home("data")) is not None:
        return path
    import platformdirs  # only when needed: keeps a HEADRACE_HOME start lean

    return Path(platformdirs.user_data_dir("headrace", appauthor=False))


def cache_dir() -> Path:
    """What can be made again: calibrations, partial downloads."""
    if (path := _under_home("cache")) is not None:
        return path
    import platformdirs

    return Path(platformdirs.user_cache_dir("headrace", appauthor=False))


def kept_chats_dir() -> Path:
    """The K/V of recent chats (`runtime.kv.disk`)."""
    return cache_dir() / "chats"


def config_dir() -> Path:
    """The user's settings file."""
    if (path := _under_home("config")) is not None:
        return path
    import platformdirs

    return Path(platformdirs.user_config_dir("headrace", appauthor=False))
