"""Parsing of a model argument (`-m`) into one of four kinds. Files are not opened.

    parse_source("qwen3-4b")                         -> CatalogName
    parse_source("./my-model"), "~/m", "/models/m"   -> LocalDirectory
    parse_source("model.Q4_K_M.gguf")                -> LocalGGUF
    parse_source("mlx-community/Qwen3-4B-4bit@main") -> HubId

An existing path takes precedence. Text that can only be a path (it starts with `/`, `./`, `../` or `~`, or ends in
`.gguf`) must exist. Catalog names and hub ids are not checked for existence.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.runtime.errors import ModelNotFoundError, UsageError

_CATALOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Repository names as the hub allows them: no leading or trailing separator, no "..", no "--".
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
# Branches, tags, commit hashes and pull request refs such as refs/pr/1.
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,254}[A-Za-z0-9_])?")


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
    """A model repository on the hub; `revision` is None for its default branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


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
    if _looks_like_path(text):
        raise ModelNotFoundError(f"no such file or directory: {_shorten(text)}")
    if "/" in text:
        return _hub_id(text)
    if _CATALOG_NAME.fullmatch(text):
        return CatalogName(text)
    raise UsageError(
        f"not a model name, path or hub id: {_shorten(text)}",
        "a hub id looks like org/name or org/name@revision, a path starts with ./ or /",
    )


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text in {".", ".."} or text.lower().endswith(".gguf")


def _is_model(path: Path) -> bool:
    return path.is_file() or (path / "config.json").is_file() or len(_ggufs(path)) == 1


def _ggufs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.gguf"))


def _local(path: Path) -> LocalDirectory | LocalGGUF:
    path = path.absolute()
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


def _hub_id(text: str) -> HubId:
    repo, at, revision = text.partition("@")
    parts = repo.split("/")
    malformed = (
        len(parts) != 2
        or any(_REPO_PART.fullmatch(part) is None or ".." in part or "--" in part for part in parts)
        or (at and (_REVISION.fullmatch(revision) is None or ".." in revision or "//" in revision))
    )
    if malformed:
        raise UsageError(f"not a hub id: {_shorten(text)}", "a hub id looks like org/name or org/name@revision")
    return HubId(repo, revision or None)


def _shorten(text: str) -> str:
    """Return `text` escaped and shortened for a one-line message."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= 120 else shown[:117] + "..."
