"""Presets: a system prompt and answer options under a name, in a TOML file of the user's, a table for each.

    [translator]
    system = "Translate my messages into French."
    temperature = 0.2
    stop = ["###"]

Unknown keys are refused. Saving a preset keeps the rest of the file as it is.

Guard: tests/app/config/test_presets.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.config.file_lock import alone_with
from headrace.app.config.settings import name_in, read_toml, refuse_unknown, shown, write_whole
from headrace.runtime.config.paths import config_dir
from headrace.runtime.config.value_types import Text, read_value
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_LONGEST_NAME = 40  # characters
_KEYS = ("system", *(name for name in OPTIONS if name != "logit_bias"))  # its token ids are of one model


class Preset(Struct, frozen=True):
    """system: the system prompt, empty for none. sampling: answer options that are set, as a session stores them."""

    system: str = ""
    sampling: Mapping[str, object] = field(default_factory=dict)


def presets_path() -> Path:
    """Return the path of the presets file."""
    return config_dir() / "presets.toml"


def load_presets(path: Path | None = None) -> dict[str, Preset]:
    """Return all presets by name, in the order of the file; none without a file. Raises UsageError."""
    path = path or presets_path()
    return {name: _preset(path, name, table) for name, table in read_toml(path).items()}


def chosen_preset(presets: Mapping[str, Preset], name: str) -> Preset:
    """Return the preset of a name. Raises UsageError for an unknown one."""
    if name not in presets:
        raise UsageError(f"no preset called {name!r}", "one of " + ", ".join(presets) if presets else None)
    return presets[name]


def save_preset(name: str, preset: Preset, path: Path | None = None) -> None:
    """Store a preset in place of one of the same name. Raises UsageError."""
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(f"a preset's name must have 1 to {_LONGEST_NAME} printable characters")
    table = {}
    if preset.system:
        table["system"] = preset.system
    table |= AnswerOptions.read(preset.sampling).stored()
    _change(path or presets_path(), lambda document: document.update({name: table}))


def delete_preset(name: str, path: Path | None = None) -> None:
    """Delete a preset. Raises UsageError for an unknown name."""

    def remove(document: "TOMLDocument") -> None:
        if name not in document:
            raise UsageError(f"no preset called {name!r}")
        document.remove(name)

    _change(path or presets_path(), remove)


def _change(path: Path, change: "Callable[[TOMLDocument], object]") -> None:
    import tomlkit

    with alone_with(path):
        load_presets(path)  # refuses to change an invalid file
        document = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
        change(document)
        write_whole(path, tomlkit.dumps(document))


def _preset(path: Path, name: str, table: object) -> Preset:
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {shown(name)} is a preset, a table, not a setting")
    refuse_unknown(path, name, table, _KEYS)
    named = name_in(path, name)
    system = read_value(Text(), named("system"), table.get("system", ""))
    options = {key: value for key, value in table.items() if key != "system"}
    return Preset(system, AnswerOptions.read(options, shown_as=named).stored())
