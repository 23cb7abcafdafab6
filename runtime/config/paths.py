"""Folders of headrace: model store, caches, settings.

Platform directories by default, subfolders of HEADRACE_HOME if set. Writers create their folder. Raises UsageError if
HEADRACE_HOME is not a folder.

A kind of file belongs to one folder: lost data is a loss (`data_dir`), lost caches cost time only (`cache_dir`).

Guard: tests/runtime/config/test_files.py.
"""

from pathlib import Path

from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def _under_home(kind: str) -> Path | None:
    """Return a subfolder of HEADRACE_HOME, which need not exist yet; None if that is not set.

    Raises UsageError if a file is in its way.
    """
    home = environment.home()
    if not home:
        return None
    try:
        path = Path(home).expanduser()
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        usable = nearest.is_dir()  # the folders below it are made by writers
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, no permission
        usable = False
    if not usable:
        raise UsageError(f"HEADRACE_HOME: {home} is not a folder")
    return path / kind


def data_dir() -> Path:
    """Return the folder of models and sessions."""
    if (path := _under_home("data")) is not None:
        return path
    import platformdirs  # slow to import, not needed with HEADRACE_HOME

    return Path(platformdirs.user_data_dir("headrace", appauthor=False))


def cache_dir() -> Path:
    """Return the folder of files that can be made again: measurements, chats' K/V, logs of the engine."""
    if (path := _under_home("cache")) is not None:
        return path
    import platformdirs

    return Path(platformdirs.user_cache_dir("headrace", appauthor=False))


def kept_chats_dir() -> Path:
    """Return the folder of recent chats' K/V (`runtime.kv.disk`)."""
    return cache_dir() / "chats"


def chats_cleared_file() -> Path:
    """Return the empty file that is touched when that folder is emptied."""
    return cache_dir() / "chats.cleared"


def config_dir() -> Path:
    """Return the folder of the user's settings file."""
    if (path := _under_home("config")) is not None:
        return path
    import platformdirs

    return Path(platformdirs.user_config_dir("headrace", appauthor=False))


def shown_name(path: Path) -> str:
    """Return a file's or folder's name for one line of text: a line break or control character as U+FFFD."""
    return "".join(char if char.isprintable() else "\ufffd" for char in path.name)
