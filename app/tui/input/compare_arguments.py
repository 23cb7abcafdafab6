"""Completion of the arguments of `/compare`: installed models, presets, settings."""

import shlex

from headrace.app.config.settings import SAMPLING_ROWS
from headrace.runtime.errors import HeadraceError

_COMMAND = "/compare "


def compare_arguments(before_cursor: str) -> tuple[str, list[str]] | None:
    """Return the word before the cursor and its completions; None for another command."""
    if not before_cursor.startswith(_COMMAND) or "\n" in before_cursor:
        return None
    word = before_cursor.rpartition(" ")[2]
    return word, [known for known in _known() if known.startswith(word) and known != word]


def _known() -> list[str]:
    from headrace.app.config.presets import load_presets
    from headrace.models.registry.store import Store

    try:
        presets = [f"preset={shlex.quote(name)}" for name in load_presets()]
    except HeadraceError:  # reported when a preset is applied
        presets = []
    settings = [f"{name}=" for name in SAMPLING_ROWS]
    return [*Store().names(), *presets, *settings, "system=", "model="]
