"""`headrace models`: list, pull, show, path, rm and verify.

Each command finds the models, and prints the documents of `app.model_info.model_report`: as they are with --json, else
as tables (`models_list.py`) or lines (`models_show.py`). Names, licences and origins come from downloaded files, so
they are printed without control characters.

Guard: tests/app/cli/test_models.py.
"""

from pathlib import Path

import click

from headrace.app.cli.awake import keep_awake
from headrace.app.cli.completion import installed_names, model_names
from headrace.app.cli.decorators import json_option
from headrace.app.cli.load_for_answers import agree_to_copy
from headrace.app.cli.models_list import print_models
from headrace.app.cli.models_show import fact_rows
from headrace.app.cli.models_verify import verified_line, verify_model
from headrace.app.cli.say import confirm, dimmed, print_json, say
from headrace.app.model_info.kv_fits import usable_memory
from headrace.app.model_info.model_report import (
    adapter_documents,
    catalog_document,
    checkpoint_document,
    foreign_documents,
    gguf_document,
    hub_document,
    overview,
)
from headrace.app.output.document import Document
from headrace.app.output.progress import drawn_progress
from headrace.app.output.sanitise import safe_line, sanitise
from headrace.app.predict.recommend import recommended_uses
from headrace.models.registry.catalog import find, squashed
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.import_gguf import find_copy
from headrace.models.registry.progress import Progress
from headrace.models.registry.resolve import (
    ResolvedModel,
    find_source,
    installed_name,
    names_on_disk,
    resolve,
    stored_name,
)
from headrace.models.registry.source import CatalogName, LocalGGUF
from headrace.models.registry.store import CachedFiles, Store, directory_bytes
from headrace.runtime.errors import CheckpointError, HeadraceError, UsageError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.metrics.units import format_bytes

_GROUP_SIZE = 64  # weights per scale, without --group-size
_LABEL = 14  # cells of a label of `show`


@click.group()
def models() -> None:
    """List, fetch, inspect, verify and remove models."""


@models.command("list")
@click.argument("filter", metavar="[FILTER]", required=False, shell_complete=model_names)
@json_option
def list_models(filter: str | None, as_json: bool) -> None:
    """List installed models, the catalog, with memory needs, other programs' models, and adapters.

    FILTER: only those with this text in their name. Exit code 1 if there is none.
    """
    from headrace.models.registry.hub_cache import cached_models  # imports huggingface_hub

    store = Store()
    cached = cached_models()
    rows = overview(store, usable_memory())
    foreign = foreign_documents(store, cached)
    adapters = adapter_documents(cached)
    if filter is not None:
        rows = [row for row in rows if squashed(filter) in squashed(f"{row['name']} {row['title']}")]
        foreign = [row for row in foreign if squashed(filter) in squashed(str(row["name"]))]
        adapters = [row for row in adapters if squashed(filter) in squashed(str(row["name"]))]
        if not rows and not foreign and not adapters:
            raise HeadraceError(f"no model has {filter!r} in its name", "`headrace models list` lists all models")
    uses = recommended_uses(machine(), usable_memory())
    rows = [row | {"recommended_for": uses.get(row["name"], [])} for row in rows]
    if as_json:
        print_json(rows + foreign + adapters)
        return
    print_models(rows, foreign, adapters)


@models.command()
@click.argument("name", required=False, shell_complete=model_names)
@click.option(
    "--quantize", type=int, metavar="BITS", help="Quantized copy of a plain checkpoint: 2, 3, 4, 5, 6 or 8 bits."
)
@click.option("--group-size", type=int, metavar="N", help="Weights per scale for --quantize: 32, 64 or 128 [64].")
@click.option("--as", "kept_as", metavar="NEW_NAME", help="Name of the quantized copy [NAME and the bits].")
@click.option("-q", "--quiet", is_flag=True, help="Errors only.")
@json_option
def pull(
    name: str | None, quantize: int | None, group_size: int | None, kept_as: str | None, quiet: bool, as_json: bool
) -> None:
    """Fetch or update NAME [the default model]."""
    keep_awake()
    if kept_as is not None and quantize is None:
        raise UsageError("--as needs --quantize")
    if group_size is not None and quantize is None:
        raise UsageError("--group-size needs --quantize")
    opened = agree_to_copy(name, quiet=quiet or as_json, ask=False)
    with drawn_progress(quiet=quiet) as progress:
        model = resolve(name, progress=progress, refresh=True, opened=opened)
        if quantize is not None:
            if group_size is None:
                group_size = _GROUP_SIZE
            model = _keep_quantized(model, quantize, group_size, kept_as, progress)
    if as_json:
        print_json(checkpoint_document(model, usable_memory()))
    elif not quiet:
        say(f"{safe_line(model.name)} is ready in {model.path}")


@models.command()
@click.argument("name", required=False, shell_complete=model_names)
@json_option
def show(name: str | None, as_json: bool) -> None:
    """Show NAME's format, size and cost per step.

    Reads the headers alone, no weights.
    """
    document = _document(name)
    if as_json:
        print_json(document)
        return
    for label, text in fact_rows(document):
        click.echo(f"{dimmed(label.ljust(_LABEL))}{safe_line(text)}")


@models.command()
@click.argument("name", required=False, shell_complete=installed_names)
def path(name: str | None) -> None:
    """Print the directory of an installed model."""
    click.echo(_local(name).path)


@models.command()
@click.argument("name", shell_complete=installed_names)
@click.option("--yes", is_flag=True, help="Remove without asking.")
def rm(name: str, yes: bool) -> None:
    """Remove NAME, a model or an adapter, and its files in the hub's cache. Exit code 1 if declined."""
    from headrace.models.registry.hub_cache import cached_bytes, cached_models, delete_cached

    # Find the entry, its files in the hub's cache, and the bytes of both.
    store = Store()
    adapter = next((cached for cached in cached_models() if cached.is_adapter and cached.name == name), None)
    if adapter is not None:
        entry = adapter.name
        files: CachedFiles | None = adapter.files
        users = _models_with(store, adapter.files, entry)
        if users:
            raise UsageError(f"{entry} shares files of the hub's cache with {users[0]}", f"remove {users[0]} first")
        stored = 0
    else:
        entry = installed_name(name, store)
        files = _unshared_files(store, entry)
        stored = directory_bytes(store.root / entry)
    cached = 0
    if files is not None:
        cached = cached_bytes(files)

    if not yes:
        size = format_bytes(stored + cached)
        if cached:
            size += f", {format_bytes(cached)} of it in the hub cache that other programs may use"
        confirm(f"Remove {entry} ({size})?", f"removing {entry}")

    freed = 0
    # The store's entry goes first: without its files in the cache it would be broken.
    if adapter is None:
        freed = store.remove(entry)
    if files is not None:
        try:
            freed += delete_cached(files)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CheckpointError(f"files of {entry} in the hub's cache cannot be deleted: {reason}") from error
    say(f"removed {entry}, {format_bytes(freed)} freed")


def _keep_quantized(
    model: ResolvedModel, bits: int, group_size: int, kept_as: str | None, progress: Progress
) -> ResolvedModel:
    """Quantize a model into the store. kept_as: name of the copy; None: the model's and the bits."""
    # late: only --quantize needs these
    from headrace.models.checkpoint.quantization import Quantization
    from headrace.models.loading.keep_quantized import keep_quantized

    quantized = keep_quantized(model, Quantization(bits, group_size), name=kept_as, progress=progress)
    return resolve(quantized.name, fetch=False)


def _unshared_files(store: Store, entry: str) -> CachedFiles | None:
    """Return the files of a model in the hub's cache; None without any, or if another installed model needs them."""
    try:
        model = store.get(entry)
    except CheckpointError:  # a broken entry can still be removed
        return None
    if model is None or model.cached_files is None or _models_with(store, model.cached_files, entry):
        return None
    return model.cached_files


def _models_with(store: Store, files: CachedFiles, entry: str) -> list[str]:
    """Return the other installed models with a file in the hub's cache among those of an entry."""
    return [other.name for other in store.list() if other.name != entry and _overlap(other.cached_files, files)]


def _overlap(files: CachedFiles | None, others: CachedFiles) -> bool:
    """Return whether files of a model are among others.

    Older entries store a GGUF without its folder in the repository, so that it may be in any.
    """
    if files is None or (files.repo, files.commit) != (others.repo, others.commit):
        return False
    if files.file is None or others.file is None:  # the revision, with all of its files
        return others.file is None
    same_name = Path(files.file).name == Path(others.file).name
    has_no_folder = "/" not in files.file or "/" not in others.file
    return files.file == others.file or (same_name and has_no_folder)


def _document(name: str | None) -> Document:
    """Return the document of one model, without a download.

    Facts come from the headers of an installed or local model, or of one on the hub; of any other from the catalog.
    """
    store = Store()
    usable = usable_memory()
    source = None
    if name is not None:
        source = find_source(name, store)
    if isinstance(source, LocalGGUF) and find_copy(source.path, store) is None:
        return gguf_document(source.path, usable)
    if isinstance(source, CatalogName) and store.get(source.name) is None:
        return catalog_document(find(source.name, lambda: names_on_disk(store)), usable)
    if isinstance(source, HubId):
        stored = stored_name(str(source))
        if stored and store.get(stored) is None:
            return hub_document(source, usable)
    return checkpoint_document(_local(name), usable)


def _local(name: str | None) -> ResolvedModel:
    """Return the model, without a download or a conversion."""
    with drawn_progress() as progress:
        return resolve(name, progress=progress, fetch=False)


@models.command()
@click.argument("name", required=False, shell_complete=installed_names)
@json_option
def verify(name: str | None, as_json: bool) -> None:
    """Compare installed files with their checksums.

    NAME: one model [all]. Exit code 1 on damage.
    """
    store = Store()
    names = store.names()
    if name is not None:
        names = [installed_name(name, store)]
    rows = []
    for entry in names:
        with drawn_progress() as progress:
            rows.append(verify_model(store, entry, progress))
        if not as_json:
            click.echo(sanitise(verified_line(rows[-1])))
    if as_json:
        print_json(rows)
    elif not names:
        click.echo("no model is installed", err=True)
    damaged = [row.name for row in rows if row.state == "damaged"]
    if damaged:
        hint = f"`headrace models rm {damaged[0]}` and `headrace models pull` install it again"
        raise CheckpointError(f"damaged: {', '.join(damaged)}", hint)
