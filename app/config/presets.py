"""Presets: a system prompt and sampling settings under a name, in a TOML file of the user's, a table for each.

    [translator]
    system = "Translate what I write into French."
    temperature = 0.2
    stop = ["###"]

Nothing unknown is accepted. Saving one leaves the rest of the file as the user wrote it.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.app.config.file_lock import alone_with
from headrace.app.config.settings import checked_sampling, shown
from headrace.runtime.config.paths import config_dir
from headrace.runtime.config.replace_file import replace_file
from headrace.runtime.errors import HeadraceError, UsageError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Preset:
    """system: the system prompt, empty for none. sampling: sampling settings, max_tokens, stop and thinking, if set."""

    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


def presets_path() -> Path:
    """Where the presets are."""
    return config_dir() / "presets.toml"


def load_presets(path: Path | None = None) -> dict[str, Preset]:
    """All presets by name, in the order of the file; none where there is no file. Raises UsageError."""
    path = path or presets_path()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(f"{path} is not valid TOML: {reason}") from None
    return {name: _preset(path, name, table) for name, table in document.items()}


def save_preset(name: str, preset: Preset, path: Path | None = None) -> None:
    """Keep it, in the place of one of the same name. Raises UsageError."""
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(f"a preset's name has 1 to {_LONGEST_NAME} characters that show")
    values = {key: list(value) if key == "stop" else value for key, value in preset.sampling.items()}
    table = {"system": preset.system} | values if preset.system else values
    _change(path or presets_path(), lambda document: document.update({name: table}))


def delete_preset(name: str, path: Path | None = None) -> None:
    """Raises UsageError where there is none of that name."""

    def remove(document: "TOMLDocument") -> None:
        if name not in document:
            raise UsageError(f"there is no preset {name}")
        document.remove(name)

    _change(path or presets_path(), remove)


def _change(path: Path, change: "Callable[[TOMLDocument], object]") -> None:
    import tomlkit

    with alone_with(path):
        load_presets(path)  # a file that cannot be understood is not touched
        document = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
        change(document)
        try:
            replace_file(path, tomlkit.dumps(document))
        except OSError as error:
            raise HeadraceError(f"{path} cannot be written: {error.strerror}") from None


def _preset(path: Path, name: str, table: Any) -> Preset:
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {shown(name)} is a preset, a table, not a setting")
    values = dict(table)
    system, stop = values.pop("system", ""), values.pop("stop", None)
    if not isinstance(system, str):
        raise UsageError(f"{path}: system in [{shown(name)}] must be a text in quotes")
    if stop is not None and not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise UsageError(f"{path}: stop in [{shown(name)}] must be a list of texts")
    sampling = checked_sampling(path, name, values)
    return Preset(system, sampling if stop is None else {**sampling, "stop": stop})
