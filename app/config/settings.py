"""The user's settings: one TOML file, every setting with its default and a comment.

The structs below, and the table of answer options, decide names, types, defaults, ranges and comments. A missing
file or key means the default; unknown keys are refused. A change keeps the rest of the file as it is.

Guard: tests/app/config/test_settings.py.
"""

import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from msgspec import Struct, field

from headrace.app.answer.options import OPTIONS, AnswerOption, AnswerOptions
from headrace.app.config.file_lock import alone_with
from headrace.app.config.load_options import ACTIVATION_NAMES, KV_NAMES
from headrace.runtime.config import environment
from headrace.runtime.config.files import read_regular, replace_file
from headrace.runtime.config.paths import config_dir
from headrace.runtime.config.value_types import Flag, Number, OneOf, Text, Whole, annotations_of, read_value
from headrace.runtime.errors import HeadraceError, UsageError

_LARGEST = 1 << 20  # bytes of a file


class ChatSettings(Struct, frozen=True):
    """Defaults of new conversations."""

    model: Annotated[
        str, AnswerOption(Text(), "Catalog name, hub id or path, as after -m. Empty: the default model")
    ] = ""
    system: Annotated[str, AnswerOption(Text(), "System prompt of new conversations")] = ""
    draft: Annotated[str, AnswerOption(Text(), "Draft model, a smaller one of the same vocabulary. Empty: none")] = ""
    context: Annotated[int, AnswerOption(Whole(), "Context limit in tokens. 0: the model's, as memory allows")] = 0
    kv: Annotated[str, AnswerOption(OneOf(KV_NAMES), "K/V format, as --kv: f16, q8, k8v4, q4 or auto")] = "f16"
    activations: Annotated[
        str, AnswerOption(OneOf(ACTIVATION_NAMES), "Bits of prompts' activations: 16, 8 or auto")
    ] = "16"
    read_ahead: Annotated[
        bool, AnswerOption(Flag(), "Prompt prefetch: prefill of typed text in the pauses of typing")
    ] = True
    kept_gb: Annotated[
        float, AnswerOption(Number(), "Gigabytes on disk for the K/V of recent chats, to reopen them fast; 0: none")
    ] = 2.0
    show_thinking: Annotated[bool, AnswerOption(Flag(), "Show the thinking of reasoning models unfolded")] = False


class ScreenSettings(Struct, frozen=True):
    """Appearance of the chat."""

    theme: Annotated[
        str, AnswerOption(Text(), "Theme, by its name in the command palette. Empty: the terminal's light or dark")
    ] = ""
    decode_view: Annotated[
        bool,
        AnswerOption(Flag(), "Open the decode view beside the chat where there is room"),
    ] = True
    decode_view_width: Annotated[int, AnswerOption(Whole(30, 120), "Width of the decode view in columns")] = 46
    mouse: Annotated[
        bool, AnswerOption(Flag(), "Handle the mouse in the chat; off leaves selecting to the terminal")
    ] = True


class RunSettings(Struct, frozen=True):
    """Settings of `headrace run` alone; model, system prompt, context and sampling are those above."""

    save: Annotated[bool, AnswerOption(Flag(), "Store every answer as a conversation, as --save does")] = False


class Settings(Struct, frozen=True):
    """All settings, by section of the file."""

    chat: ChatSettings = field(default_factory=ChatSettings)
    sampling: AnswerOptions = field(default_factory=AnswerOptions)
    screen: ScreenSettings = field(default_factory=ScreenSettings)
    run: RunSettings = field(default_factory=RunSettings)


_SECTIONS: dict[str, type[object]] = get_type_hints(Settings)
_SAMPLING_DOC = "Sampling of the chat, run and batch. Unset: the model's recommendation, else greedy."


def settings_path() -> Path:
    """Return the path of the settings file, which may not exist."""
    return config_dir() / "settings.toml"


def load_settings(path: Path | None = None) -> Settings:
    """Return the user's settings. Raises UsageError, one line with the path, for an unknown key or a wrong value."""
    path = path or settings_path()
    document = read_toml(path)
    for name, table in document.items():
        if name not in _SECTIONS:
            raise UsageError(f"{path}: unknown section [{shown(name)}]", f"known sections: {', '.join(_SECTIONS)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name} is a section, not a setting")
    return Settings(**{name: _section(path, name, document.get(name, {})) for name in _SECTIONS})


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's document, empty without a file. Raises UsageError, one line with the path."""
    try:
        content = read_regular(path, _LARGEST)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}") from None
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{path} is not valid TOML: {reason}") from None


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content, or leave it as it is. Raises HeadraceError if it cannot be written."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise HeadraceError(f"{path} cannot be written: {error.strerror}") from None


def chosen_model(given: str | None, settings: Settings) -> str | None:
    """Return the model's name: the command line's, else HEADRACE_MODEL, else the settings'; None for the default."""
    return given if given is not None else environment.model() or settings.chat.model or None


def default_text() -> str:
    """Return the settings file with every setting at its default, documented."""
    lines = ["# headrace settings. Missing and commented-out settings have the default shown."]
    for name, section in _SECTIONS.items():
        doc = section.__doc__
        if section is AnswerOptions:
            doc = _SAMPLING_DOC
        lines += ["", f"# {doc}", f"[{name}]"]
        defaults = section()
        for key, row in _rows(section).items():
            default = getattr(defaults, key)
            lines.append(f"# {row.help}.")
            if default is None:
                lines.append(f"# {key} = {_toml(row.example)}")
            else:
                lines.append(f"{key} = {_toml(default)}")
    return "\n".join(lines) + "\n"


def write_default(path: Path | None = None) -> bool:
    """Write the documented file unless one exists. Return True if written. Raises HeadraceError."""
    path = path or settings_path()
    if path.exists():
        return False
    with alone_with(path):
        if path.exists():  # another process came first
            return False
        write_whole(path, default_text())
    return True


def save_setting(section: str, name: str, value: object, path: Path | None = None) -> Settings:
    """Change one setting in the file and keep the rest as it is. Raises UsageError as `load_settings`."""
    import tomlkit

    path = path or settings_path()
    with alone_with(path):
        write_default(path)
        load_settings(path)  # refuses to change an invalid file
        _section(path, section, {name: value})
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
        document.setdefault(section, tomlkit.table())[name] = value
        write_whole(path, tomlkit.dumps(document))
        return load_settings(path)


def refuse_unknown(path: Path, section: str, table: Mapping[str, object], known: Collection[str]) -> None:
    """Raise UsageError that names the first key of a section that is not known."""
    for key in table:
        if key not in known:
            raise UsageError(
                f"{path}: unknown setting {shown(key)} in [{shown(section)}]", f"known settings: {', '.join(known)}"
            )


def name_in(path: Path, section: str) -> Callable[[str], str]:
    """Return a function that names a key of a section of a file in errors."""
    return lambda key: f"{path}: {key} in [{shown(section)}]"


def shown(name: str) -> str:
    """Return a name from a file for an error message of one line."""
    return name if name.isprintable() and len(name) <= 80 else f"{name!a:.80}"


SAMPLING_ROWS: Mapping[str, AnswerOption] = {name: row for name, row in OPTIONS.items() if row.example is not None}
"""Rows of the [sampling] section."""


def _rows(section: type[Any]) -> Mapping[str, AnswerOption]:
    if section is AnswerOptions:
        return SAMPLING_ROWS
    return annotations_of(section)


def _section(path: Path, name: str, table: Mapping[str, object]) -> Any:
    """Return the typed section of a table. Raises UsageError for an unknown key or a wrong value."""
    section = _SECTIONS[name]
    rows = _rows(section)
    refuse_unknown(path, name, table, rows)
    named = name_in(path, name)
    if section is AnswerOptions:
        return AnswerOptions.read(table, shown_as=named)
    return section(**{key: read_value(rows[key].kind, named(key), value) for key, value in table.items()})


def _toml(value: object) -> str:
    """Return a default or an example as TOML writes it; their texts have nothing to escape."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
