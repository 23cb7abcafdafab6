"""Installed models that a server may serve, and the names under which requests may name them.

The names come from requests: `is_served`, `model_named` and `is_loosely` compare them with the models' names and never
open a file under one.

Guard: tests/app/server/test_served_models.py.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.engine.model_card import ModelCard
from headrace.models.architectures.fields import text_section
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.side_file import read_json_object
from headrace.models.registry.adapters import name_with, split_adapter
from headrace.models.registry.resolve import find_source
from headrace.models.registry.source import LocalDirectory, LocalGGUF, path_exists
from headrace.models.registry.store import Store, StoredModel
from headrace.runtime.config.paths import shown_name
from headrace.runtime.errors import CheckpointError, HeadraceError, UsageError

_OWN_NAMES = ("default", "headrace")
"""Names that stand for the model of the start in every server."""


class InstalledModel(Struct, frozen=True):
    """A model of the store.

    name: as requests give it.
    stored_as: its name in the store.
    context: the longest one in tokens; None: unknown.
    weight_bytes: of its files; 0: unknown.
    """

    name: str
    stored_as: str
    context: int | None
    weight_bytes: int


def is_served(name: str | None, card: ModelCard, aliases: frozenset[str]) -> bool:
    """Return whether a request for this name is one for the model of the start; None and "" are that one, too."""
    return not name or name in (card.name, *_OWN_NAMES, *aliases)


def installed_models(only: Sequence[str] | None = None) -> list[InstalledModel]:
    """Return the models of the store, in the order of their names. only: names to return; None: all.

    Names may be those of other programs' models, too. A name with an adapter, BASE+ADAPTER, is a model of its own.
    """
    models = [_installed(model) for model in Store().list()]
    if only is None:
        return models
    chosen: list[InstalledModel] = []
    for name in only:
        base, adapter = split_adapter(name)
        model = model_named(base, models) or _local(base)
        if model is None:
            continue
        if adapter is not None:
            model = replace(model, name=name_with(model.name, adapter), stored_as=f"{model.stored_as}+{adapter}")
        if any(model.name == other.name for other in chosen):  # adapters of one name in two folders
            model = replace(model, name=model.stored_as)
        chosen.append(model)
    return chosen


def model_named(name: str, models: Sequence[InstalledModel]) -> InstalledModel | None:
    """Return the model of a name, in any case of letters, also by its name in the store; None without one.

    A name that no model has may be a loose spelling of one model's.
    """
    wanted = name.lower()
    for model in models:
        if wanted in (model.name.lower(), model.stored_as.lower()):
            return model
    similar = [model for model in models if is_loosely(name, model.name)]
    return similar[0] if len(similar) == 1 else None


def is_loosely(name: str, model_name: str) -> bool:
    """Return whether a name is another spelling of a model's: with BASE:ADAPTER, or without the folder of a path.

    No file is looked for under the name, which comes from a request.
    """
    base, adapter = model_name, None
    with suppress(UsageError):  # the name of a folder may end in a plus sign
        base, adapter = split_adapter(model_name)
    spellings = [model_name]
    if path_exists(base):
        without_folder = shown_name(Path(base).expanduser())
        spellings.append(without_folder if adapter is None else f"{without_folder}+{adapter}")
    return _with_colon(name) in map(_with_colon, spellings)


def _with_colon(name: str) -> str:
    return name.lower().replace("+", ":")


def _installed(model: StoredModel) -> InstalledModel:
    try:
        weights = sum(file.stat().st_size for file in model.path.iterdir() if file.suffix in (".safetensors", ".gguf"))
    except OSError:
        weights = 0
    return InstalledModel(str(model.origin.get("id", model.name)), model.name, _context(model.path), weights)


def _local(name: str) -> InstalledModel | None:
    """Return a model that another program keeps under this name; None without one."""
    try:
        source = find_source(name, Store())
    except HeadraceError:
        return None
    if not isinstance(source, LocalDirectory | LocalGGUF):
        return None
    if source.path.is_dir():
        return _installed(StoredModel(name, source.path, source.path, {}))
    return InstalledModel(name, name, None, source.path.stat().st_size)


def _context(directory: Path) -> int | None:
    try:
        config = normalized(read_json_object(directory / "config.json"))
    except CheckpointError:
        return None
    length = text_section(config).get("max_position_embeddings")
    return length if isinstance(length, int) else None
