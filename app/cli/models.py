"""`headrace models`: list, pull, show, path, rm and verify. Facts come from `app.model_info.model_report`.

Names, licences and origins come from downloaded files, so they are printed without control characters. With --json a
command prints the document as it is; `show` without it prints `_rows` of the same document.

Guard: tests/app/cli/test_models.py.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import click
from msgspec import Struct

from headrace.app.cli.awake import keep_awake
from headrace.app.cli.completion import installed_names, model_names
from headrace.app.cli.load_for_answers import agree_to_copy
from headrace.app.cli.model_options import json_option
from headrace.app.cli.say import confirm, dimmed, print_json, say
from headrace.app.model_info.chat_facts import chat_line
from headrace.app.model_info.kv_fits import NOTHING, fits_short, fits_text, usable_memory
from headrace.app.model_info.model_report import (
    MEMORY_CONTEXT,
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
from headrace.app.output.sanitise import sanitise
from headrace.app.output.tables import Column, print_table
from headrace.app.predict.recommend import recommended_uses
from headrace.app.predict.uses import STAR, legend
from headrace.app.quantize.figures import QuantizedHere
from headrace.models.registry.catalog import find, squashed
from headrace.models.registry.checksums import content_problems, recorded_files
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
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import CheckpointError, HeadraceError, UsageError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.metrics.units import format_bytes, percent

_GROUP_SIZE = 64  # weights per scale, without --group-size
_LABEL = 14  # cells of a label of `show`
_MAX_DIFFERING = 8  # modules in another format that `show` names; more would fill the screen

# Texts of `show` for the values of `sequences`, `speculates` and `draft_head` in `checkpoint_document`.
_SEQUENCES = {
    "batched": "several share each pass (`batch`, `run --samples`)",
    "turns": "several take turns, one pass each",
}
_SPECULATION = {
    True: "supported",
    False: "off: the cache cannot drop rejected draft tokens",
    None: "unknown: the model's architecture is not supported",
}
_HEAD = ", with a multi-token prediction head"
# Text of `verify` for a model without checksums.
_UNRECORDED = "not checked: installed without checksums (`headrace models rm` and `pull` add them)"
T = TypeVar("T")


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

    # A table for each kind, with a blank line between two
    if rows:
        _print_overview(rows)
    if foreign:
        if rows:
            click.echo()
        click.echo("ELSEWHERE ON THIS DISK, run by these names:")
        print_table(_foreign_columns(foreign), rule=False)
    if adapters:
        if rows or foreign:
            click.echo()
        click.echo("ADAPTERS in the hub's cache, run after a model: -m MODEL+NAME")
        print_table(_adapter_columns(adapters), rule=False)
        _print_problems(adapters)


def _print_overview(rows: list[Document]) -> None:
    print_table(_columns(rows), rule=False)
    _print_problems(rows)
    click.echo(f"\nMEMORY: weights, KV cache of {_tokens(MEMORY_CONTEXT)} tokens, and the program itself.")
    if any(row["context_fits"] for row in rows):
        click.echo("FITS: tokens of context in the memory free now, by K/V format (--kv).")
    if stars := legend({row["name"]: row["recommended_for"] for row in rows}):
        click.echo(stars)


def _print_problems(rows: list[Document]) -> None:
    for row in rows:
        if problem := row.get("problem"):
            click.echo(_clean(f"{row['name']}: {problem}"))


def _columns(rows: list[Document]) -> list[Column]:
    def column(name: str, leaves: int, cell: Callable[[Document], str], *, right: bool = False) -> Column:
        """Make a column of clean texts. leaves: see `Column`."""
        return Column.of(rows, name, lambda row: _clean(cell(row)), leaves, right=right)

    return [
        column("NAME", 0, _marked_name),
        column("SIZE", 1, _size, right=True),
        column("MEMORY", 0, lambda row: _or_dash(row["memory_bytes"], format_bytes), right=True),
        column("CONTEXT", 3, lambda row: _or_dash(row["context"], _tokens), right=True),
        column(f"FITS {'/'.join(_formats(rows))}", 5, lambda row: fits_short(row["context_fits"], row["context"])),
        column("FORMAT", 4, lambda row: _or_dash(row["quantization"], str)),
        column("LICENCE", 6, lambda row: _or_dash(row["licence"], str)),
        column("", 2, _state),
    ]


def _foreign_columns(rows: list[Document]) -> list[Column]:
    return [
        Column.of(rows, "NAME", lambda row: _clean(row["name"]), 0, right=False),
        Column.of(rows, "SIZE", lambda row: format_bytes(row["disk_bytes"]), 1, right=True),
        Column.of(rows, "OF", lambda row: row["program"], 2, right=False),
        Column.of(rows, "FOLDER", lambda row: _clean(_folder(row)), 3, right=False),
    ]


def _folder(row: Document) -> str:
    """Return the folder of a model or an adapter, that of the repository in the hub's cache, with ~ for the home."""
    path = Path(row["path"])
    folder = path if path.is_dir() else path.parent
    repository = next((parent for parent in folder.parents if parent.name.startswith("models--")), folder)
    with suppress(RuntimeError, ValueError):  # no home, or outside of it
        return f"~/{repository.relative_to(Path.home())}"
    return str(repository)


def _adapter_columns(rows: list[Document]) -> list[Column]:
    return [
        Column.of(rows, "NAME", lambda row: _clean(row["name"]), 0, right=False),
        Column.of(rows, "SIZE", lambda row: format_bytes(row["disk_bytes"]), 1, right=True),
        Column.of(rows, "MADE FOR", lambda row: _clean(row["made_for"] or "not stated"), 2, right=False),
        Column.of(rows, "FOLDER", lambda row: _clean(_folder(row)), 3, right=False),
    ]


def _formats(rows: list[Document]) -> list[str]:
    """Return the K/V formats of the row with most of them."""
    return max((list(row["context_fits"] or ()) for row in rows), key=len, default=[])


def _typed_name(row: Document) -> str:
    """Return the name as `-m` takes it; the store calls a hub repository org--name."""
    if "--" in row["name"] and "/" in row["title"]:
        return str(row["title"])
    return str(row["name"])


def _marked_name(row: Document) -> str:
    """Return the name with its marks: the default, a recommended model."""
    name = _typed_name(row)
    if row["default"]:
        name += " (default)"
    if row["recommended_for"]:
        name += f" {STAR}"
    return name


def _state(row: Document) -> str:
    if row.get("problem"):
        return "broken"
    if copied := row.get("copy_of"):
        return f"copy of {Path(copied).name}"
    if file := row.get("runs_from"):
        return f"runs {Path(file).name}"
    if row["installed"]:
        return "installed"
    return ""


def _size(row: Document) -> str:
    if row["installed"]:
        return format_bytes(row["disk_bytes"])
    return format_bytes(row["download_bytes"])


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
        say(f"{_clean(model.name)} is ready in {model.path}")


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
    for label, text in _rows(document):
        click.echo(f"{dimmed(label.ljust(_LABEL))}{_clean(text)}")


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
    # imports mlx, which the other subcommands do not need
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
    """Return the headers' facts of an installed or local model or of one on the hub, the catalog's of any other."""
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


def _rows(document: Document) -> list[tuple[str, str]]:
    rows = [("Model", document["name"])]
    if not document["installed"]:
        rows += _missing_rows(document)
    rows += [("Origin", document["origin"]), ("Licence", document["licence"] or "not stated")]
    if "released" in document:
        rows.append(("Released", document["released"] + (", made for code" if document["use"] == "code" else "")))
    if document["installed"]:
        decoder = "headrace's own decoder"
        if document["decoder"] != "headrace":
            from headrace.models.mlx_lm.fixes import class_name  # late: other models need none of it

            decoder = class_name({"model_type": document["architecture"]})
        rows += [
            ("Directory", document["path"]),
            ("Architecture", f"{document['architecture']}, run by {decoder}"),
            ("Sequences", _SEQUENCES[document["sequences"]]),
            ("Speculation", _SPECULATION[document["speculates"]] + _HEAD * document["draft_head"]),
            ("Chat", chat_line(document["chat"])),
            ("On disk", format_bytes(document["disk_bytes"])),
        ]
    rows.append(("Context", f"{_tokens(document['context'])} tokens"))
    rows += _quantization_rows(document)
    rows += _quality_rows(document.get("quantized_here"))
    rows.append(("Weights", format_bytes(document["weight_bytes"])))
    if document.get("bytes_per_step") is not None:
        rows.append(("Decode step", _step_text(document)))
    if document["kv_bytes_per_token"] is not None:
        rows.append(("KV cache", f"{format_bytes(document['kv_bytes_per_token'])} a token, in half precision"))
    if fits := fits_text(document["context_fits"], document["context"]):
        if fits != NOTHING:
            fits += " tokens of context"
        rows.append(("Fits now", fits))
    if document["memory_bytes"] is not None:
        context = _tokens(document["memory_context"])
        rows.append(("Memory", f"{format_bytes(document['memory_bytes'])} with {context} tokens of context"))
    return rows


def _missing_rows(document: Document) -> list[tuple[str, str]]:
    if document.get("copy_bytes") == 0:
        return [("", "not in the store, and needs no copy there: it runs from its file")]
    if "copy_bytes" in document:
        pull = f"`headrace models pull {document['path']}` copies it"
        return [("", f"not in the store: {pull}"), ("Copy", format_bytes(document["copy_bytes"]))]
    pull = f"`headrace models pull {document['name']}` fetches it"
    size = "unknown"
    if document["download_bytes"] is not None:
        size = format_bytes(document["download_bytes"])
    return [("", f"not installed: {pull}"), ("Download", size)]


def _step_text(document: Document) -> str:
    weights = document["weight_bytes_per_step"]
    total = document["bytes_per_step"]
    context = _tokens(document["memory_context"])
    return f"{format_bytes(weights)} of weights; {format_bytes(total)} in all after {context} tokens"


def _quantization_rows(document: Document) -> list[tuple[str, str]]:
    stated = document["quantization"]
    if isinstance(stated, str):
        return [("Format", stated)]
    formats: dict[str, int] = stated["formats"]
    rows = [("Format", "; ".join(f"{count} × {name}" for name, count in formats.items()) or "no matrices")]
    differing: dict[str, str] = stated["differing"]
    if len(differing) <= _MAX_DIFFERING:
        rows += [("", f"{module}: {name}") for module, name in differing.items()]
    if document["stored_format"]:
        rows.append(("Loading", document["stored_format"]))
    requantized = document["requantized"]
    if requantized:
        kinds = sorted({f"{row.get('type')} to {row.get('became')}" for row in requantized})
        rows.append(("Requantized", f"{len(requantized)} tensors have no exact form in MLX: {', '.join(kinds)}"))
    return rows


class _Verified(Struct):
    """The state of a model's files.

    state: whole: all checksums are right; unrecorded: the model was installed without checksums.
    problems: of damaged files, or the reason why the model cannot be read.
    """

    name: str
    path: str | None = None  # None without files
    state: Literal["whole", "damaged", "unrecorded"] = "damaged"
    files: int = 0
    bytes: int = 0
    problems: list[str] = []


def _quality_rows(stored: object) -> list[tuple[str, str]]:
    """Return the figures that `headrace quantize` stored; nothing for a text or an object of another form."""
    try:
        quality = typed(QuantizedHere, stored)
    except ValueError:  # headrace.json of a folder may be anyone's
        return []
    top1 = percent(quality.top1_agreement.value, 1)
    text = f"{quality.kl.value:.4f} nats of KL from the given weights; most likely token equal in {top1}"
    rows = [("Quality", text), ("Bits a weight", f"{quality.bits_per_weight:.3f}")]
    speed = quality.predicted
    at_most = "at most " if speed.bound else ""
    rows += [
        ("Predicted", f"{at_most}{speed.tokens_per_second:.1f} tok/s on {speed.target} after {speed.context:,} tokens"),
        (
            "Measured",
            f"{quality.measured_tokens_per_second:.1f} tok/s when it was quantized, at the beginning of a context",
        ),
    ]
    return rows


def _tokens(count: int) -> str:
    """Return a number of tokens; a multiple of 1,024 in the form `8k`."""
    if count >= 1024 and count % 1024 == 0:
        return f"{count // 1024}k"
    return str(count)


def _or_dash(value: T | None, text: Callable[[T], str]) -> str:
    return "-" if value is None else text(value)


def _clean(text: str) -> str:
    """Return text without control characters and line breaks, so that it stays in its line."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


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
            rows.append(_verified(store, entry, progress))
        if not as_json:
            click.echo(sanitise(_verified_line(rows[-1])))
    if as_json:
        print_json(rows)
    elif not names:
        click.echo("no model is installed", err=True)
    damaged = [row.name for row in rows if row.state == "damaged"]
    if damaged:
        hint = f"`headrace models rm {damaged[0]}` and `headrace models pull` install it again"
        raise CheckpointError(f"damaged: {', '.join(damaged)}", hint)


def _verified(store: Store, name: str, progress: Progress) -> _Verified:
    try:
        model = store.get(name)
    except HeadraceError as error:
        return _Verified(name, problems=[str(error)])
    if model is None:
        return _Verified(name, problems=["its files are missing"])
    path = str(model.path)
    files = recorded_files(model.origin)
    if files is None:
        return _Verified(name, path, "unrecorded")
    problems = content_problems(model.path, files, progress)
    size = sum(entry["bytes"] for entry in files.values())
    state: Literal["whole", "damaged"] = "whole"
    if problems:
        state = "damaged"
    return _Verified(name, path, state, len(files), size, problems)


def _verified_line(row: _Verified) -> str:
    if row.state == "unrecorded":
        return f"{row.name}: {_UNRECORDED}"
    if row.state == "damaged":
        return f"{row.name}: DAMAGED: {'; '.join(row.problems)}"
    return f"{row.name}: whole ({row.files} files, {format_bytes(row.bytes)})"
