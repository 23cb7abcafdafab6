"""The user's settings: one TOML file, every setting with its default and a comment, nothing unknown accepted.

The dataclasses below are the whole truth: names, types, defaults, limits and comments of the file follow from them.
A missing file or key means the default. Reading needs the standard library only; changing a value keeps the rest of
the file as the user wrote it.
"""

import math
import tomllib
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from headrace.app.config.file_lock import alone_with
from headrace.app.config.kv_option import KV_NAMES
from headrace.runtime.config import environment
from headrace.runtime.config.paths import config_dir
from headrace.runtime.config.replace_file import replace_file
from headrace.runtime.errors import HeadraceError, UsageError

_LARGEST_SEED = 2**64 - 1
SPECULATE = ("off", "ngram")
"""What guesses tokens ahead, without a draft model."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting can be, and in words; nan is in none."""

    least: float = 0
    most: float = math.inf
    above: bool = False  # `least` itself is not in it

    def holds(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        lower = f"above {self.least:g}" if self.above else f"{self.least:g} or more"
        most = "2^64 - 1" if self.most == _LARGEST_SEED else f"{self.most:g}"
        return lower if self.most == math.inf else f"{lower}, at most {most}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The texts that a setting can be."""

    names: tuple[str, ...]

    def holds(self, value: str) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


def _setting(default: Any, comment: str, *, example: Any = None, allowed: Range | OneOf = Range()) -> Any:
    """A setting; `example` stands in the file, commented out, where the default is to leave it to the model."""
    return field(default=default, metadata={"comment": comment, "example": example, "range": allowed})


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a new conversation begins with."""

    model: str = _setting("", "Catalog name, hub id or path, as after -m. Empty: the default model.")
    system: str = _setting("", "System prompt of new conversations.")
    draft: str = _setting("", "A smaller model of the same vocabulary that guesses tokens ahead. Empty: none.")
    context: int = _setting(0, "Context limit in tokens. 0: what the model was made for and memory allows.")
    kv: str = _setting("f16", "How K/V are stored, as --kv: f16, q8, k8v4, q4 or auto.", allowed=OneOf(KV_NAMES))
    read_ahead: bool = _setting(True, "Read what is typed into the KV cache in the pauses of typing.")
    kept_gb: float = _setting(2.0, "Gigabytes on disk for the K/V of recent chats, which then reopen at once; 0: none.")
    show_thinking: bool = _setting(False, "Show the thinking of reasoning models unfolded.")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How new conversations are answered. Unset: what the model recommends, else temperature 0.7 and min_p 0.05."""

    temperature: float | None = _setting(
        None, "0 always takes the likeliest token.", example=0.7, allowed=Range(0, 100)
    )
    top_k: int | None = _setting(None, "Keep the k likeliest tokens; 0 is off.", example=40)
    top_p: float | None = _setting(
        None, "Keep the smallest set with this much probability.", example=0.95, allowed=Range(0, 1, above=True)
    )
    min_p: float | None = _setting(
        None, "Drop tokens below this share of the likeliest one's.", example=0.05, allowed=Range(0, 1)
    )
    repetition_penalty: float | None = _setting(
        None, "Above 1 makes tokens seen before less likely.", example=1.1, allowed=Range(0.01, 100)
    )
    presence_penalty: float | None = _setting(
        None, "Subtracted once from tokens already said.", example=0.0, allowed=Range(-100, 100)
    )
    frequency_penalty: float | None = _setting(
        None, "Subtracted for every time a token was said.", example=0.0, allowed=Range(-100, 100)
    )
    seed: int | None = _setting(
        None, "Same seed, same machine, same answer.", example=1, allowed=Range(0, _LARGEST_SEED)
    )
    max_tokens: int | None = _setting(None, "Longest answer, in tokens.", example=2048, allowed=Range(1))
    speculate: str | None = _setting(
        None,
        "What guesses tokens ahead, off or ngram; answers stay the same.",
        example="ngram",
        allowed=OneOf(SPECULATE),
    )
    thinking: bool | None = _setting(None, "Whether reasoning models that can be told think first.", example=False)


@dataclass(frozen=True, slots=True)
class ScreenSettings:
    """How the chat looks."""

    theme: str = _setting("", "Name of a theme, as the command palette lists them. Empty: after the terminal.")
    decode_view: bool = _setting(True, "Open the decode view beside the chat where there is room.")
    decode_view_width: int = _setting(46, "Its width in columns.", allowed=Range(30, 120))
    mouse: bool = _setting(True, "Let the chat handle the mouse; off leaves selecting to the terminal.")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What `headrace run` does besides; model, system prompt, context and sampling are those of new conversations."""

    save: bool = _setting(False, "Keep every answer as a conversation, as --save does.")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, by section of the file."""

    chat: ChatSettings = field(default_factory=ChatSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    screen: ScreenSettings = field(default_factory=ScreenSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @property
    def sampling_given(self) -> dict[str, Any]:
        """The sampling settings that are set: what a new session begins with."""
        return {name: value for name, value in asdict(self.sampling).items() if value is not None}


_SECTIONS: dict[str, type[Any]] = {
    "chat": ChatSettings,
    "sampling": SamplingSettings,
    "screen": ScreenSettings,
    "run": RunSettings,
}


def sampling_range(name: str) -> Range:
    """The numbers that a sampling setting can be, wherever it is set."""
    (allowed,) = (setting.metadata["range"] for setting in fields(SamplingSettings) if setting.name == name)
    assert isinstance(allowed, Range)
    return allowed


def settings_path() -> Path:
    """Where the settings file is, or would be."""
    return config_dir() / "settings.toml"


def load_settings(path: Path | None = None) -> Settings:
    """The user's settings. Raises UsageError, with one line that says where, for anything not understood."""
    path = path or settings_path()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits
        raise UsageError(f"{path} is not valid TOML: {_first_line(error)}") from None
    for name, table in document.items():
        if name not in _SECTIONS:
            raise UsageError(f"{path}: unknown section [{shown(name)}]", f"known sections: {', '.join(_SECTIONS)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name} is a section, not a setting")
    return Settings(**{name: _section(path, name, document.get(name, {})) for name in _SECTIONS})


def chosen_model(given: str | None, settings: Settings) -> str | None:
    """The model to use: what the command line gives, else HEADRACE_MODEL, else the settings; None for the default."""
    return given if given is not None else environment.model() or settings.chat.model or None


def default_text() -> str:
    """The settings file with every setting at its default, documented."""
    lines = ["# headrace settings. What is missing or commented out has the default shown."]
    for name, section in _SECTIONS.items():
        lines += ["", f"# {section.__doc__}", f"[{name}]"]
        for setting in fields(section):
            unset = setting.default is None
            value = setting.metadata["example"] if unset else setting.default
            lines += [f"# {setting.metadata['comment']}", f"{'# ' if unset else ''}{setting.name} = {_toml(value)}"]
    return "\n".join(lines) + "\n"


def write_default(path: Path | None = None) -> bool:
    """Put the documented file there unless one exists; whether it was written. Raises HeadraceError if it cannot be."""
    path = path or settings_path()
    if path.exists():
        return False
    with alone_with(path):
        if path.exists():  # another process came first
            return False
        _replace(path, default_text())
    return True


def save_setting(section: str, name: str, value: Any, path: Path | None = None) -> Settings:
    """Change one setting in the file, leaving everything else in it as it is. Raises UsageError as `load_settings`."""
    import tomlkit

    path = path or settings_path()
    with alone_with(path):
        write_default(path)
        load_settings(path)  # a file that cannot be understood is not touched
        _section(path, section, {name: value})
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
        document.setdefault(section, tomlkit.table())[name] = value
        _replace(path, tomlkit.dumps(document))
        return load_settings(path)


def _replace(path: Path, text: str) -> None:
    """Put `text` there whole, or leave what is there. Raises HeadraceError if it cannot be written."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise HeadraceError(f"{path} cannot be written: {error.strerror}") from None


def checked_sampling(path: Path, name: str, table: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of a table called `name` in `path`, as they are set there. Raises UsageError."""
    section = _section(path, name, table, SamplingSettings)
    return {key: getattr(section, key) for key in table}


def shown(name: str) -> str:
    """A name from a file, in an error of one line."""
    return name if name.isprintable() and len(name) <= 80 else f"{name!a:.80}"


def _section(path: Path, name: str, table: dict[str, Any], section: type[Any] | None = None) -> Any:
    section = section or _SECTIONS[name]
    known = {setting.name: setting for setting in fields(section)}
    for key, value in table.items():
        if key not in known:
            raise UsageError(
                f"{path}: unknown setting {shown(key)} in [{shown(name)}]", f"known settings: {', '.join(known)}"
            )
        wanted = _complaint(known[key], _types(section, key), value)
        if wanted:
            raise UsageError(f"{path}: {key} in [{shown(name)}] must be {wanted}, not {value!r:.80}")
    return section(**table)


def _types(section: type[Any], key: str) -> set[type]:
    hint = get_type_hints(section)[key]
    return set(get_args(hint)) - {type(None)} or {hint}


def _complaint(setting: Field[Any], types: set[type], value: Any) -> str | None:
    """What the value should have been; None if it is fine. A whole number may stand where a fraction may."""
    (kind,) = types
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        return {str: "a text in quotes", bool: "true or false", int: "a whole number", float: "a number"}[kind]
    allowed = setting.metadata["range"]
    if kind is bool or (kind is str and isinstance(allowed, Range)):
        return None
    return None if allowed.holds(value) else str(allowed)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
