"""Parsing of a model argument (`-m`) into one of four kinds. Files are not opened.

    parse_source("qwen3-4b"), "qwen3:4b"             -> CatalogName
    parse_source("./my-model"), "~/m", "/models/m"   -> LocalDirectory
    parse_source("model.Q4_K_M.gguf")                -> LocalGGUF
    parse_source("mlx-community/Qwen3-4B-4bit@main") -> HubId
    "org/name:Q4_K_M", "org/name/file.gguf", "https://huggingface.co/org/name"

An existing path takes precedence. Text that can only be a path (it starts with `/`, `./`, `../` or `~`, or ends in
`.gguf` below an existing folder or none) must exist. Catalog names and hub ids are not checked for existence.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from headrace.models.checkpoint.side_file import check_name
from headrace.models.checkpoint.split_files import first_parts
from headrace.runtime.errors import ModelNotFoundError, UsageError

_CATALOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Repository names as the hub allows them: no leading or trailing separator, no "..", no "--".
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
# Branches, tags, commit hashes and pull request refs such as refs/pr/1.
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,254}[A-Za-z0-9_])?")
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")
_TAGGED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,60}):([A-Za-z0-9][A-Za-z0-9._-]{0,30})")
_HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)|(?:huggingface\.co|hf\.co)|hf:/)/(.*)", re.DOTALL
)
_TREES = ("tree", "blob", "resolve", "raw")  # what follows is a revision and a path
_FORMS = "a hub id looks like org/name, org/name:Q4_K_M, org/name/file.gguf or org/name@revision"


@dataclass(frozen=True, slots=True)
class CatalogName:
    """A bare word: the name of a catalog entry or of a stored model."""

    name: str


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """An existing directory with a config.json, absolute."""

    path: Path


@dataclass(frozen=True, slots=True)
class LocalGGUF:
    """An existing .gguf file, absolute."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubId:
    """A model repository on the hub; `revision` is None for its default branch.

    file, quantization: the .gguf file to use, by path or by its quantization in capitals.
    """

    repo: str
    revision: str | None = None
    file: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        part = f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        return f"{self.repo}{part}@{self.revision}" if self.revision else f"{self.repo}{part}"


Source = CatalogName | LocalDirectory | LocalGGUF | HubId


def parse_source(text: str) -> Source:
    """Parse the argument of `-m`.

    Raises UsageError for text that has none of the four forms, ModelNotFoundError for a missing path or one that is
    not a model.
    """
    if not text.strip():
        raise UsageError("the model name is empty", "`headrace models list` lists all models")
    if "\0" in text:
        raise UsageError("the model name has a NUL character in it")
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # name too long, unknown ~user
        raise UsageError(f"not a usable model name or path: {_shorten(text)}") from error
    # A bare word is a path only if a model is there, so that an unrelated folder does not hide a catalog entry.
    if exists and (_looks_like_path(text) or "/" in text or _is_model(path)):
        return _local(path)
    if (url := _HUB_URL.fullmatch(text.strip())) is not None:
        return _hub_url(url[1])
    if _looks_like_path(text) and not _in_a_repository(text):
        raise ModelNotFoundError(f"no such file or directory: {_shorten(text)}")
    if "/" in text:
        return _hub_id(text)
    if _CATALOG_NAME.fullmatch(text):
        return CatalogName(text)
    if (tagged := _TAGGED.fullmatch(text)) is not None:
        return CatalogName(_with_tag(tagged[1], tagged[2]))
    raise UsageError(f"not a model name, path or hub id: {_shorten(text)}", f"{_FORMS}; a path starts with ./ or /")


def _with_tag(name: str, tag: str) -> str:
    """Return the catalog's name for `qwen3:4b`; `name-tag` if there is none."""
    from headrace.models.registry.catalog import respelled

    return respelled(f"{name}-{tag}") or f"{name}-{tag}"


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text in {".", ".."} or text.lower().endswith(".gguf")


def _is_model(path: Path) -> bool:
    return path.is_file() or (path / "config.json").is_file() or len(_ggufs(path)) == 1


def _ggufs(directory: Path) -> list[Path]:
    """Return the .gguf files of a directory, of a split model only the first."""
    return [directory / name for name in first_parts(sorted(file.name for file in directory.glob("*.gguf")))]


def _local(path: Path) -> LocalDirectory | LocalGGUF:
    path = path.absolute()
    check_name(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return LocalDirectory(path)
        ggufs = _ggufs(path)
        if len(ggufs) == 1:
            return LocalGGUF(ggufs[0])
        hint = f"it has {len(ggufs)} .gguf files: pass one, for example {ggufs[0]}" if ggufs else None
        raise ModelNotFoundError(f"{path} has no config.json, so it is not a model directory", hint)
    if path.suffix.lower() == ".gguf":
        return LocalGGUF(path)
    if path.suffix == ".safetensors":
        raise ModelNotFoundError(
            f"{path.name} has only weights", f"pass its directory, which also has the config: {path.parent}"
        )
    raise ModelNotFoundError(f"{path} is neither a model directory nor a .gguf file")


def _in_a_repository(text: str) -> bool:
    """Return whether `text` may be org/name/file.gguf on the hub: its first folder does not exist here."""
    parts = text.split("/")
    return len(parts) > 2 and parts[0] not in {"", ".", "..", "~"} and not Path(parts[0]).expanduser().exists()


def _hub_id(text: str) -> HubId:
    """Parse org/name, org/name:QUANTIZATION or org/name/FILE.gguf, with @REVISION or without."""
    place, at, revision = text.partition("@")
    place, colon, quantization = place.partition(":")
    org, _, rest = place.partition("/")
    name, slash, file = rest.partition("/")
    parts = (org, name)
    malformed = (
        any(_REPO_PART.fullmatch(part) is None or ".." in part or "--" in part for part in parts)
        or (slash and not (_is_file_name(file) and file.lower().endswith(".gguf") and not colon))
        or (colon and _QUANTIZATION.fullmatch(quantization) is None)
        or (at and (_REVISION.fullmatch(revision) is None or ".." in revision or "//" in revision))
    )
    if malformed:
        raise UsageError(f"not a hub id: {_shorten(text)}", _FORMS)
    return HubId(f"{org}/{name}", revision or None, file or None, quantization.upper() or None)


def _is_file_name(path: str) -> bool:
    return path.isprintable() and all(part not in {"", ".", ".."} for part in path.split("/"))


def _hub_url(path: str) -> HubId:
    """Parse the address of a model's page, of one of its branches or of one of its files."""
    path = re.split(r"[?#]", path, maxsplit=1)[0].strip("/")
    if path.partition("/")[0] in {"datasets", "spaces"}:
        raise UsageError(f"{_shorten(path)} is no model", "paste the address of a model's page")
    parts = [*path.split("/"), "", "", "", ""]
    (org, name, kind, revision), folders = parts[:4], parts[4:]
    at = f"@{unquote(revision)}" if kind in _TREES and revision not in {"", "main"} else ""
    file = unquote("/".join(folders).rstrip("/")) if kind in _TREES else ""  # else another tab of the model's page
    return _hub_id(f"{org}/{name}/{file}{at}" if file.lower().endswith(".gguf") else f"{org}/{name}{at}")


def _shorten(text: str) -> str:
    """Return `text` escaped and shortened for a one-line message."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= 120 else shown[:117] + "..."
