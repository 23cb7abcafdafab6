"""Model reports from the catalog and checkpoint headers, without reading weights.

`app/cli/models.py` prints the documents, as they are with --json. The models screen of the chat
(`app/tui/screens/models_screen.py`) shows those of `overview`. No page of docs/ lists their keys.

Each function returns one kind of document: installed, of the catalog, a .gguf file, of the hub, of other programs. All
have `name`, `installed` and `context_fits`, so a list can mix them.

Sizes are bytes. Memory is weights, a half-precision KV cache of MEMORY_CONTEXT tokens and the program itself.

Guards: tests/app/cli/test_models.py and tests/app/model_info/test_model_report.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.app.model_info.chat_facts import chat_facts
from headrace.app.model_info.kv_fits import Fits, kv_fits
from headrace.app.output.document import Document
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.checkpoint.split_files import parts_of
from headrace.models.cost.costs import checkpoint_cost, loaded_weight_bytes, shape_to_run, working_memory
from headrace.models.cost.shape_sources import shape_of_checkpoint, shape_of_gguf
from headrace.models.cost.step_shape import StepShape
from headrace.models.registry.catalog import CatalogEntry, load_catalog
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.import_gguf import copied_file, copy_bytes, is_linked, title_of
from headrace.models.registry.other_programs import foreign_models
from headrace.models.registry.resolve import DEFAULT_MODEL, ResolvedModel, find_source, resolve
from headrace.models.registry.source import LocalGGUF
from headrace.models.registry.store import INCOMPLETE, Store, StoredModel, directory_bytes
from headrace.runtime.errors import CheckpointError, HeadraceError, UnsupportedModelError, UsageError
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops.kv_format import FLOAT16, FORMATS

if TYPE_CHECKING:
    from headrace.models.mlx_lm.network import MlxLmNetwork
    from headrace.models.registry.hub_cache import CachedModel

MEMORY_CONTEXT = 4096
"""Tokens in the cache for all figures of memory."""


def overview(store: Store, usable: int | None = None) -> list[Document]:
    """Return a document per model: installed ones first, broken entries of the store too, then the rest of the catalog.

    usable: bytes available to a model on this machine, for `context_fits`; None if unknown.
    """
    catalog = load_catalog()
    rows = []
    for name in store.names():
        try:
            model = store.get(name)
            problem = None
        except CheckpointError as error:
            model = StoredModel(name, store.root / name, store.root / name, {})
            problem = str(error)
        if model is None and name not in catalog:  # of the catalog's, nothing is installed
            model = StoredModel(name, store.root / name, store.root / name, {})
            problem = f"{INCOMPLETE}; `headrace models rm {name}` removes it"
        if model is not None:
            row = _installed(model, catalog.get(name), usable)
            if problem is not None:
                row["problem"] = problem
            rows.append(row)
    names = {row["name"] for row in rows}
    return rows + [_available(entry, usable) for name, entry in catalog.items() if name not in names]


def foreign_documents(store: Store, cached: Sequence["CachedModel"] = ()) -> list[Document]:
    """Return a document per model that lies elsewhere on this disk; headers are not read.

    Those are the models of other programs, and those of the hub's cache that no entry of the store names.
    cached: models and adapters of the hub's cache.
    """
    installed = {model.cached_files for model in store.list()}
    rows = [_outside(model.name, model.path) | {"program": model.program} for model in foreign_models()]
    for model in cached:
        if not model.is_adapter and model.files not in installed:
            rows.append(_outside(model.name, model.path) | {"program": "hub's cache"})
    return rows


def adapter_documents(cached: Sequence["CachedModel"]) -> list[Document]:
    """Return a document per adapter of the hub's cache. Headers are read; a broken one has a `problem`."""
    rows = []
    for adapter in cached:
        if not adapter.is_adapter:
            continue
        base = None
        problem = None
        try:
            base = adapter.base()
        except HeadraceError as error:
            problem = str(error)
        rows.append(_outside(adapter.name, adapter.path) | {"adapter": True, "made_for": base, "problem": problem})
    return rows


def _outside(name: str, path: Path) -> Document:
    """Return the facts of a model or an adapter outside the store, without those of its headers."""
    return {
        "name": name,
        "title": name,
        "installed": False,
        "default": False,
        "path": str(path),
        "disk_bytes": _disk_bytes(path),
        "memory_context": None,
        "memory_bytes": None,
        "context": None,
        "context_fits": None,
        "quantization": None,
        "licence": None,
    }


def catalog_document(entry: CatalogEntry, usable: int | None = None) -> Document:
    """Return the catalog's facts of a model that is not installed. usable: as for `overview`."""
    source = entry.source
    if isinstance(source, HubId):
        origin = f"{source.repo} on the hub"
    else:
        origin = f"the package {source.requirement}"
    return {
        **_available(entry, usable),
        "origin": origin,
        "parameters": entry.parameters,
        "weight_bytes": entry.weight_bytes,
        "kv_bytes_per_token": entry.step_shape.cost.kv_bytes_per_token,
    }


def gguf_document(file: Path, usable: int | None = None) -> Document:
    """Return the facts in the header of a .gguf file that the store has no conversion of.

    usable: as for `overview`. Raises CheckpointError and UnsupportedModelError.
    """
    from headrace.models.gguf.container import open_container
    from headrace.models.gguf.convert import stated_licence
    from headrace.models.gguf.metadata import Metadata

    container = open_container(file)
    return {
        "name": title_of(file, container),
        "installed": False,
        "path": str(file),
        "origin": f"local file {file}",
        "licence": stated_licence(Metadata(container.metadata)),
        "copy_bytes": copy_bytes(container),
        **_shape_document(shape_of_gguf(container), usable),
    }


def hub_document(source: HubId, usable: int | None = None) -> Document:
    """Return the facts of a model on the hub that is not installed, from its config.json or its GGUF's header.

    usable: as for `overview`. Raises CheckpointError, UnsupportedModelError, FetchError and ModelNotFoundError.
    """
    from headrace.models.registry.fetch_hub import fetch_header
    from headrace.models.registry.find_shape import shape_of_header

    header = fetch_header(source)
    return {
        "name": str(source),
        "installed": False,
        "origin": f"{source.repo} on the hub",
        "licence": header.licence,
        "download_bytes": header.size,
        **_shape_document(shape_of_header(header), usable),
    }


def _shape_document(shape: StepShape, usable: int | None) -> Document:
    _origin, _, stored_as = shape.source.partition(", ")  # as `shape_sources` words it: "GGUF headers, Q4_K"
    cached = min(MEMORY_CONTEXT, shape.context_length)
    return {
        "context": shape.context_length,
        "quantization": stored_as,
        "parameters": shape.parameters,
        "weight_bytes": shape.resident_bytes,
        "kv_bytes_per_token": shape.cost.kv_bytes_per_token,
        "bytes_per_step": shape.cost.step_bytes(cached),
        "weight_bytes_per_step": shape.cost.weight_bytes,
        "memory_context": cached,
        "memory_bytes": shape.resident_bytes + shape.cost.kv_bytes(cached) + working_memory(shape),
        "context_fits": kv_fits(shape, usable, packs=True),
    }


def checkpoint_document(model: ResolvedModel, usable: int | None = None) -> Document:
    """Return a model's facts from its headers, configuration and origin. Raises CheckpointError for broken files.

    usable: as for `overview`.
    """
    from headrace.models.loading.decoder_choice import (  # imports mlx
        context_length,
        many_sequences,
        network_kind,
    )

    checkpoint = open_checkpoint(model.path)
    kind = network_kind(checkpoint)
    cost = checkpoint_cost(checkpoint)
    network = None
    if kind == "mlx-lm":
        network = _mlx_lm_network(checkpoint)
        if network is not None and cost is None:
            cost = network.cost
    context = context_length(checkpoint)
    cached = min(MEMORY_CONTEXT, context)
    of_step: Document = dict.fromkeys(("weight_bytes_per_step", "kv_bytes_per_token", "bytes_per_step"))
    if cost is not None:
        of_step["weight_bytes_per_step"] = cost.weight_bytes
        of_step["kv_bytes_per_token"] = cost.kv_bytes_per_token
        of_step["bytes_per_step"] = cost.step_bytes(cached)
    return {
        "name": model.name,
        "installed": True,
        "stored_as": model.stored_as,
        "path": str(model.path),
        "origin": model.origin,
        "licence": model.licence,
        "architecture": checkpoint.config.get("model_type"),
        "decoder": kind,
        "sequences": many_sequences(checkpoint),
        "speculates": _speculates(checkpoint),
        "draft_head": _has_head(checkpoint),
        "chat": chat_facts(model.path),
        "context": context,
        "quantization": quantization_document(checkpoint),
        "stored_format": checkpoint.foreign.describe() if checkpoint.foreign is not None else None,
        "requantized": checkpoint.inexact,
        "quantized_here": (checkpoint.origin or {}).get("quantized_here"),
        "weight_bytes": checkpoint.nbytes,
        "disk_bytes": _disk_bytes(model.path),
        "tensors": len(checkpoint.tensors),
        **of_step,
        "memory_context": cached,
        "memory_bytes": _memory(checkpoint, cost, cached),
        "context_fits": _fits(checkpoint, cost, context, usable, network),
    }


def _speculates(checkpoint: Checkpoint) -> bool | None:
    """Return whether speculation is possible; None for unsupported models."""
    from headrace.models.loading.decoder_choice import verifies_drafts

    try:
        return verifies_drafts(checkpoint)
    except (CheckpointError, UnsupportedModelError):
        return None


def _has_head(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has a multi-token prediction head that can draft tokens."""
    from headrace.models.network.mtp import head_tensors  # late: imports mlx.nn

    return head_tensors(checkpoint) is not None


def memory_needed(name: str | None) -> int | None:
    """Return the bytes of a model with MEMORY_CONTEXT tokens; None if unknown.

    Raises `resolve`'s errors: nothing is fetched, no GGUF converted.
    """
    if isinstance(find_source(name or DEFAULT_MODEL, Store()), LocalGGUF):
        return None
    checkpoint = open_checkpoint(resolve(name, fetch=False).path)
    cached = min(MEMORY_CONTEXT, _stated_context(checkpoint) or MEMORY_CONTEXT)
    return _memory(checkpoint, checkpoint_cost(checkpoint), cached)


def _stated_context(checkpoint: Checkpoint) -> int | None:
    """Return the context length of config.json; None if it states none."""
    context = checkpoint.config.get("max_position_embeddings")
    return context if isinstance(context, int) else None


def quantization_document(checkpoint: Checkpoint) -> Document:
    """Count modules by format, and list those that differ from the most common one."""
    section = checkpoint.quantization or {}
    formats: dict[str, str] = {}
    for tensor, info in checkpoint.tensors.items():
        module, _, part = tensor.rpartition(".")
        if part == "scales":
            formats[module] = _format_of(section, module)
        elif part == "weight" and len(info.shape) > 1:
            formats.setdefault(module, info.dtype)
    counts = Counter(formats.values()).most_common()
    usual = next((name for name, _ in counts), None)
    return {
        "formats": dict(counts),
        "differing": {module: name for module, name in formats.items() if name != usual},
    }


def _format_in_list(checkpoint: Checkpoint) -> str | None:
    """Return the most common format, or the mean bits of a checkpoint with bits chosen for each projection."""
    chosen = (checkpoint.origin or {}).get("quantized_here")
    match chosen:
        case {"bits_per_weight": float(bits)}:
            return f"{bits:.2f} bits, mixed"
    return next(iter(quantization_document(checkpoint)["formats"]), None)


def _format_of(section: Mapping[str, object], module: str) -> str:
    from headrace.models.checkpoint.quantization import layer_quantization  # imports mlx

    try:
        return format_text(*layer_quantization(section, module))
    except (CheckpointError, UnsupportedModelError):  # a format that cannot be loaded is shown all the same
        return format_text(section.get("bits"), section.get("group_size"), section.get("mode", "affine"))


def format_text(bits: object, group_size: object, mode: object) -> str:
    """Return a format's name: `4-bit, groups of 64`."""
    text = f"{bits}-bit, groups of {group_size}"
    if mode == "affine":
        return text
    return f"{text}, {mode}"


def _available(entry: CatalogEntry, usable: int | None) -> Document:
    return {
        "name": entry.name,
        "installed": False,
        "default": entry.name == DEFAULT_MODEL,
        "title": entry.title,
        "download_bytes": entry.download_bytes,
        "memory_context": min(MEMORY_CONTEXT, entry.context),
        "memory_bytes": entry.memory_bytes(MEMORY_CONTEXT),
        "context": entry.context,
        "context_fits": kv_fits(entry.step_shape, usable, packs=True),
        "quantization": entry.quantization,
        "licence": entry.licence,
        "use": entry.use,
        "released": entry.released,
    }


def _installed(model: StoredModel, entry: CatalogEntry | None, usable: int | None) -> Document:
    document: Document = {
        "name": model.name,
        "installed": True,
        "default": model.name == DEFAULT_MODEL,
        "title": model.origin.get("id", model.name),
        "origin": model.origin.get("source"),
        "copy_of": None,
        "runs_from": None,
        "licence": model.origin.get("licence"),
        "disk_bytes": _disk_bytes(model.path),
        "memory_context": MEMORY_CONTEXT,
        "memory_bytes": None,
        "context": None,
        "context_fits": None,
        "quantization": None,
        "problem": None,
    }

    # The file that it was made of: a GGUF that it reads, or one that was copied.
    if is_linked(model):
        file = next(iter(model.origin["gguf"]))
        link = model.path / file
        if link.is_symlink():
            link = link.readlink()
        document["runs_from"] = str(link)
    else:
        document["copy_of"] = copied_file(model)

    # Facts of its headers
    try:
        checkpoint = open_checkpoint(model.path)
        cost = checkpoint_cost(checkpoint)
        context = _stated_context(checkpoint)
        document["context"] = context
        document["memory_context"] = min(MEMORY_CONTEXT, context or MEMORY_CONTEXT)
        document["memory_bytes"] = _memory(checkpoint, cost, document["memory_context"])
        document["context_fits"] = _fits(checkpoint, cost, context or MEMORY_CONTEXT, usable)
        document["quantization"] = _format_in_list(checkpoint)
    except CheckpointError as error:  # a broken model must not hide the others
        document["problem"] = str(error)
    if entry is None:
        return document
    # The catalog has better names; memory and context come from the headers, as in `checkpoint_document`.
    document["quantization"] = None
    return {**_available(entry, usable), **{key: value for key, value in document.items() if value is not None}}


def _mlx_lm_network(checkpoint: Checkpoint) -> "MlxLmNetwork | None":
    """Return the network without reading arrays; None if mlx-lm does not support the model."""
    import mlx.core as mx

    from headrace.models.mlx_lm.network import MlxLmNetwork  # half a second of imports, not needed by lists

    try:
        # As on a GPU, in the types of the file: for a CPU all of them would become float32.
        return MlxLmNetwork(checkpoint, device=mx.DeviceType.gpu)
    except UnsupportedModelError:
        return None


def _memory(checkpoint: Checkpoint, cost: StepCost | None, context: int) -> int | None:
    """Return the bytes of weights and `context` cached tokens; None if the size of a token is unknown."""
    if cost is None:
        return None
    shape = shape_to_run(checkpoint)
    return loaded_weight_bytes(checkpoint, shape) + cost.kv_bytes(context) + working_memory(shape)


def _fits(
    checkpoint: Checkpoint,
    cost: StepCost | None,
    context: int,
    usable: int | None,
    network: "MlxLmNetwork | None" = None,
) -> Fits | None:
    """Return the context that fits in each supported K/V format; None if cost or memory are unknown.

    checkpoint: the model.
    cost: of a step.
    context: limit of the model, in tokens.
    usable: bytes available to a model.
    network: mlx-lm's network; without it, a model of mlx-lm's gets f16 alone.
    """
    if cost is None or usable is None:
        return None
    from headrace.models.loading.decoder_choice import own_decoder
    from headrace.models.network.long_rope_decoder import long_rope

    config = own_decoder(checkpoint)
    if config is not None:
        shape = shape_of_checkpoint(checkpoint)
        loaded = replace(shape, resident_bytes=loaded_weight_bytes(checkpoint, shape) + shape.head_bytes)
        return kv_fits(loaded, usable, packs=long_rope(config) is None)
    costs = {FLOAT16.name: cost}
    if network is not None:
        for kind in FORMATS[1:]:
            with suppress(UsageError):
                costs[kind.name] = network.with_kv(kind).cost
    shape = shape_to_run(checkpoint)
    room = usable - loaded_weight_bytes(checkpoint, shape) - working_memory(shape)
    return {name: max(0, each.longest_context(room, context)) for name, each in costs.items()}


def _disk_bytes(path: Path) -> int:
    """Return a model's bytes on disk: of a file with all its parts, of a folder with the targets of its links."""
    if path.is_file():
        return sum(part.stat().st_size for part in parts_of(path))
    if not path.is_dir():  # a broken link
        return path.lstat().st_size
    links = sum(file.stat().st_size for file in path.iterdir() if file.is_symlink() and file.exists())
    return links + directory_bytes(path)
