"""Models that other programs keep on this disk: Ollama's store and LM Studio's folder. Nothing is written there.

Ollama keeps a manifest for each name, `manifests/HOST/NAMESPACE/MODEL/TAG`, which lists blobs by digest. LM Studio
keeps `PUBLISHER/MODEL/` with GGUF files or a checkpoint in MLX format, in the folder that its settings name
(`downloadsFolder` of settings.json). The hub's shared cache is read when fetching.

Guard: tests/models/registry/test_other_programs.py.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from headrace.models.checkpoint.split_files import first_parts, is_gguf, parts_of
from headrace.models.registry.hub_files import choose_gguf
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.source import LocalDirectory, LocalGGUF
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import ModelNotFoundError, UnsupportedModelError

_OLLAMA_LIBRARY = ("registry.ollama.ai", "library")  # host and namespace of names without either
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"
_HUB_HOSTS = ("hf.co", "huggingface.co")  # which Ollama keeps in names of the hub's models
_MAX_MANIFEST_BYTES = 1 << 20  # they have about 1,000
_MAX_SETTINGS_CHARACTERS = 1 << 20


class ForeignModel(Struct, frozen=True):
    """A model of another program.

    name: as `-m` takes it.
    path: a GGUF file under any name, or a directory in MLX format.
    program: the program's name.
    adapters: GGUF files of LoRA adapters that the program applies to it.
    """

    name: str
    path: Path
    program: str
    adapters: tuple[Path, ...] = ()

    @property
    def source(self) -> LocalDirectory | LocalGGUF:
        """The path as a source. Raises UnsupportedModelError for a model with several adapters."""
        if self.path.is_dir():
            return LocalDirectory(self.path)
        if len(self.adapters) > 1:
            raise UnsupportedModelError(
                f"{self.name}: {self.program} applies several adapters to this model, headrace applies one",
                f"pass its file and one of them: {self.path}+{self.adapters[0]}",
            )
        return LocalGGUF(self.path, *self.adapters)


def foreign_models() -> list[ForeignModel]:
    """Return the models of other programs, by program and name. Unreadable ones are left out."""
    return [*_ollama_models(), *_lm_studio_models()]


def find_foreign(text: str) -> ForeignModel | None:
    """Return the model that another program calls `text`: `llama3.2:3b`, `llama3.2` or a hub id such as org/name."""
    names = {text.casefold(), f"{text}:latest".casefold()}
    return next((model for model in foreign_models() if model.name.casefold() in names), None)


def find_foreign_hub(hub: HubId) -> ForeignModel | None:
    """Return the model of a hub id without a revision, which another program fetched.

    Among several quantizations that fit the id, the one that the hub's repository would give.
    """
    if hub.revision is not None:
        return None
    for name in (str(hub), *(f"{host}/{hub}" for host in _HUB_HOSTS)):
        if (exact := find_foreign(name)) is not None:
            return exact
    files = _files_of_repo(hub.repo)
    if hub.file is not None:
        return next((model for model in files.values() if model.path.name.casefold() == hub.file.casefold()), None)
    if not files:
        return None
    try:
        return files[choose_gguf(list(files), hub.repo, hub.quantization)]
    except (ModelNotFoundError, UnsupportedModelError):  # the hub may have another file
        return None


def _files_of_repo(repo: str) -> dict[str, ForeignModel]:
    """Return the GGUFs of a repository by a name with their quantization: LM Studio's files, and Ollama's tags."""
    files: dict[str, ForeignModel] = {}
    names = {f"{host}/{repo}".casefold() for host in _HUB_HOSTS}
    for model in _ollama_models():
        name, _, tag = model.name.partition(":")
        if name.casefold() in names:
            files.setdefault(f"{tag}.gguf", model)
    for model in _lm_studio_models():
        if model.path.is_file() and f"{model.name}/".casefold().startswith(f"{repo}/".casefold()):
            files.setdefault(model.path.name, model)
    return files


def _expanded(*names: str) -> list[Path]:
    """Return the paths of these names, without those in the home of a user that has none."""
    paths = []
    for name in names:
        with suppress(RuntimeError):
            paths.append(Path(name).expanduser())
    return paths


def _ollama_folders() -> list[Path]:
    """Return the stores of this user and of the system's service."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return _expanded(chosen)
    return [*_expanded("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]


def _ollama_models() -> Iterator[ForeignModel]:
    """Yield the models of Ollama's stores, those without their files left out."""
    for folder in _ollama_folders():
        for manifest in _files(folder / "manifests", depth=4):
            # address: host and namespace
            *address, model, tag = manifest.relative_to(folder / "manifests").parts
            layers = _layers(manifest)
            files = _blobs(folder, layers.get(_OLLAMA_MODEL, []))
            adapters = _blobs(folder, layers.get(_OLLAMA_ADAPTER, []))
            if not files or adapters is None:
                continue
            name = "/".join([*_typed_address(address), f"{model}:{tag}"])
            yield ForeignModel(name, files[-1], "Ollama", tuple(adapters))


def _typed_address(address: list[str]) -> list[str]:
    """Return the parts of a registry's address that users type: none for Ollama's own library."""
    if tuple(address) == _OLLAMA_LIBRARY:
        return []
    return address[1:] if address[0] == _OLLAMA_LIBRARY[0] else address


def _layers(manifest: Path) -> dict[str, list[str]]:
    """Return the digests of a manifest's layers by media type; none for a file that is no manifest."""
    digests: dict[str, list[str]] = {}
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return {}
        document: Any = json.loads(manifest.read_bytes())
        for layer in document["layers"]:
            digests.setdefault(str(layer["mediaType"]), []).append(str(layer["digest"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return digests


def _blobs(folder: Path, digests: list[str]) -> list[Path] | None:
    """Return the files of these digests; None if one is missing."""
    names = [digest.replace(":", "-") for digest in digests]
    files = [folder / "blobs" / name for name in names if "/" not in name]
    return files if len(files) == len(names) and all(file.is_file() for file in files) else None


def _lm_studio_folders() -> list[Path]:
    """Return LM Studio's folders of models: the one that its settings name, and those of its home folders."""
    homes = _expanded("~/.lmstudio", "~/.cache/lm-studio")  # of today and of versions before 0.3
    for pointer in _expanded("~/.lmstudio-home-pointer"):
        homes = [*_expanded(_text(pointer)), *homes]
    folders: list[Path] = []
    for home in homes:
        settings: object = None
        with suppress(ValueError, RecursionError):
            settings = json.loads(_text(home / "settings.json"))
        moved = as_mapping(settings).get("downloadsFolder")
        if isinstance(moved, str):
            folders += _expanded(moved)
        folders.append(home / "models")
    return list(dict.fromkeys(folder for folder in folders if folder.is_absolute()))


def _text(file: Path) -> str:
    """Return the text of a small file without the space around it; nothing for one that cannot be read."""
    try:
        with file.open(encoding="utf-8-sig") as opened:
            return opened.read(_MAX_SETTINGS_CHARACTERS).strip()
    except (OSError, ValueError):
        return ""


def _lm_studio_models() -> Iterator[ForeignModel]:
    """Yield the models in LM Studio's folders: checkpoints, and GGUFs, several in one folder by their files' names."""
    for folder in _lm_studio_folders():
        for directory in _folders(folder, depth=2):
            name = "/".join(directory.relative_to(folder).parts)
            if (directory / "config.json").is_file():
                yield ForeignModel(name, directory, "LM Studio")
                continue
            files = first_parts(sorted(file.name for file in _files(directory, depth=1) if is_gguf(file.name)))
            whole = [file for file in files if all(part.is_file() for part in parts_of(directory / file))]
            for file in whole:
                yield ForeignModel(name if len(whole) == 1 else f"{name}/{file}", directory / file, "LM Studio")


def _files(folder: Path, depth: int) -> list[Path]:
    """Return the files so many levels below a folder, sorted."""
    return [path for path in _entries(folder, depth) if path.is_file()]


def _folders(folder: Path, depth: int) -> list[Path]:
    """Return the folders so many levels below a folder, sorted."""
    return [path for path in _entries(folder, depth) if path.is_dir()]


def _entries(folder: Path, depth: int) -> list[Path]:
    """Return files and folders so many levels below a folder; none that are hidden, or below a hidden folder."""
    level = [folder]
    for _ in range(depth):
        level = [entry for parent in level for entry in _listed(parent)]
    return level


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:  # missing, a file, or not ours to read
        return []
