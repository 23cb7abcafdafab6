"""Import of GGUF files into the store: one entry per content.

The entry has tokenizer and config, and links to the file: weights are read from there, and converted while loading
(`models.checkpoint.gguf_link`). Two kinds of files are converted to MLX's layout once instead, in a copy of
`copy_bytes`: those with tensors that have to be requantized, which is slow (docs/models.md), and models that mlx-lm's
classes run, which read safetensors files.

A file is identified by its sha256, and a split model by that of its parts one after another. The store caches the hash
of each path with the file's size and modification time in `.gguf.json`, so that no file is hashed twice.

Guards: tests/models/gguf/test_link.py and test_split.py.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.models.checkpoint.gguf_link import file_facts
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.split_files import parts_of, present_parts, whole_name
from headrace.models.registry.checksums import ByteProgress, checksums, hash_file, note_checked, recorded_files
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.store import Store, StoredModel
from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.errors import HeadraceError, ModelNotFoundError

if TYPE_CHECKING:
    from headrace.models.architectures.config import DecoderConfig
    from headrace.models.gguf.container import Container
    from headrace.models.gguf.convert import ConversionPlan, Layout

_SEEN = ".gguf.json"  # the cache of hashes
_TEMPLATE = "tokenizer.chat_template"  # its key, and the beginning of those of named ones
_SOURCE = "local file "  # begins the origin of a conversion, before the file's path


class OpenedGGUF(Struct, frozen=True):
    """A file whose header has been read. stamp: its size and modification time before that, see `_stamp`."""

    container: "Container"
    stamp: list[int]


def open_gguf(file: Path) -> OpenedGGUF:
    """Read a file's header. Raises as `import_gguf`."""
    from headrace.models.gguf.container import open_container  # late: numpy

    with _readable(file):
        stamp = _stamp(file)
        return OpenedGGUF(open_container(file), stamp)


def import_gguf(
    file: Path, store: Store, *, progress: Progress = silent, opened: OpenedGGUF | None = None
) -> StoredModel:
    """Return the store's entry of `file`, installing it first if needed.

    opened: the file, if its header was read before; it is read again if the file has changed since.
    Raises CheckpointError for an invalid GGUF and ModelNotFoundError for an unreadable file.
    """
    file = parts_of(file)[0]
    with _readable(file):
        is_hashed_now = "sha256" not in _row(file, _stamp(file), store)  # if by `find_copy`, too
    known = find_copy(file, store, progress=progress)
    if known is not None:
        return known
    with _readable(file):
        if opened is None or opened.stamp != _stamp(file):  # a question to the user may have come between
            opened = open_gguf(file)
        plan = plan_of(opened.container)  # refuses a file that cannot run before gigabytes are hashed
        sha256 = _digest(file, opened.stamp, store, progress)

    title = title_of(file, opened.container)

    def build(directory: Path) -> dict[str, object]:
        files = install_weights(plan, directory, progress, sha256)
        return {"id": title, "source": f"{_SOURCE}{file}", "sha256": sha256} | files

    # Entries without their file are replaced by one of the same content, or removed if it was at the same path.
    name = stored_name(title, sha256)
    gone = [model for model in store.list() if not is_intact(model)]
    model = store.install(name, build, replace=any(stale.name == name for stale in gone), progress=progress)
    for stale in gone:
        if copied_file(stale) == str(file) and stale.name != name:
            store.remove(stale.name)
    _remember(file, opened.stamp, store, name=model.name)
    with _readable(file):
        if is_hashed_now and _stamp(file) == opened.stamp:
            _note_sound(model)
    return model


def _note_sound(model: StoredModel) -> None:
    """Note that the files which an entry links to are as recorded: they have just been read whole."""
    recorded = recorded_files(model.origin) or {}
    for name in model.origin.get("gguf", {}):
        if name in recorded:
            note_checked(model.path / name, recorded[name], [])


def plan_of(container: "Container") -> "ConversionPlan":
    """Return all that the header of a file decides. Raises CheckpointError and UnsupportedModelError."""
    from headrace.models.gguf import convert  # late: numpy and gguf take seconds

    return convert.plan_of(container)


def install_weights(
    plan: "ConversionPlan", directory: Path, progress: Progress, sha256: str | None = None
) -> dict[str, object]:
    """Link the file of a plan into `directory`, or convert it there. Return the facts for headrace.json.

    sha256: the file's digest, if known. Raises as `import_gguf`.
    """
    from headrace.models.gguf import link_gguf

    if needs_copy(plan):
        convert(plan, directory, progress, sha256)
        return {}
    link_gguf(plan, directory, sha256=sha256)
    paths = plan.container.paths
    known = {paths[0].name: sha256} if sha256 is not None and len(paths) == 1 else None
    return {"files": checksums(directory, known=known, progress=progress)}


def needs_copy(layout: "Layout") -> bool:
    """Return whether a file is converted once, instead of while loading."""
    from headrace.models.architectures.families import architecture_of
    from headrace.models.checkpoint.text_part import text_config
    from headrace.runtime import ops

    if not layout.is_exact or architecture_of(text_config(normalized(layout.config))).multiply is not None:
        return True
    decoder = _own_decoder(layout.config)
    return decoder is None or (any(layer.mixer for layer in decoder.layers) and ops.select() is not ops.native)


def is_linked(model: StoredModel) -> bool:
    """Return whether an entry reads its weights from a GGUF file outside of it."""
    return isinstance(model.origin.get("gguf"), dict)


def is_intact(model: StoredModel) -> bool:
    """Return whether the files that an entry links to are as they were; True for other entries."""
    if not is_linked(model):
        return True
    try:
        return all(file_facts(model.path / name) == facts for name, facts in model.origin["gguf"].items())
    except OSError:
        return False


def find_copy(file: Path, store: Store, *, progress: Progress | None = None) -> StoredModel | None:
    """Return the store's entry of `file`, None if there is none, or none that finds its file.

    The file is recognised by path, size and time. With `progress` a file as large as an installed one is hashed, too:
    the same content may be in the store under another name, for example a catalog model's.
    Raises as `import_gguf`.
    """
    file = parts_of(file)[0]
    with _readable(file):
        stamp = _stamp(file)
        if (known := _stored(_row(file, stamp, store), store)) is not None:
            return known
        equal = [model for model in store.list() if model.origin.get("size") == stamp[0] and is_intact(model)]
        if progress is None or not equal:
            return None
        sha256 = _digest(file, stamp, store, progress)
    model = next((model for model in equal if model.origin.get("sha256") == sha256), None)
    if model is not None:
        _remember(file, stamp, store, name=model.name)
    return model


def copies_of(path: Path, store: Store) -> list[StoredModel]:
    """Return the entries of the file that was at `path`; else those of any file of that name."""
    made = [(model, Path(file)) for model in store.list() if (file := copied_file(model)) is not None]
    path = parts_of(path)[0]
    here = [model for model, file in made if file == path]
    return here or [model for model, file in made if file.name == path.name]


def copied_file(model: StoredModel) -> str | None:
    """Return the path of the local file that a model was made from; None for other models."""
    source = str(model.origin.get("source", ""))
    return source.removeprefix(_SOURCE) if source.startswith(_SOURCE) else None


def gguf_of(model: StoredModel) -> Path | None:
    """Return the GGUF file that an entry links to, or was made from if it is still there; None for other entries."""
    if is_linked(model):
        return model.path / str(next(iter(model.origin["gguf"])))
    copied = copied_file(model)
    return Path(copied) if copied is not None and Path(copied).is_file() else None


def copy_bytes(container: "Container") -> int:
    """Return the bytes that the weights of a file add to the store, at most. Raises CheckpointError."""
    from headrace.models.gguf.convert import layout_of  # late: numpy

    layout = layout_of(container)
    if not needs_copy(layout):
        return 0
    return layout.forms(groups_of_16=_reads_groups_of_16(layout.config)).nbytes


def has_chat_template(container: "Container") -> bool:
    """Return whether a file's header has a chat template. Raises as `copy_bytes`, if it has none and cannot run."""
    from headrace.models.gguf.convert import layout_of  # late: numpy

    if any(key.startswith(_TEMPLATE) for key in container.metadata):
        return True
    layout_of(container)
    return False


def convert(file: "Path | ConversionPlan", directory: Path, progress: Progress, sha256: str | None = None) -> None:
    """Write the MLX-format conversion of `file` into `directory`. sha256: the file's digest, if known."""
    from headrace.models.gguf import convert_gguf  # late: numpy and gguf take seconds

    convert_gguf(
        file,
        directory,
        progress=lambda done, total: progress("converting", done, total),
        sha256=sha256,
        groups_of_16=_reads_groups_of_16,
    )


def _reads_groups_of_16(config: dict[str, object]) -> bool:
    """Return whether the native kernels run this config; mlx-lm's classes and stock MLX lack groups of 16."""
    from headrace.runtime import ops

    return _own_decoder(config) is not None and ops.select() is ops.native


def _own_decoder(config: dict[str, object]) -> "DecoderConfig | None":
    """Return the configuration for headrace's own decoder; None if only mlx-lm's classes run a file."""
    from headrace.models.architectures.read import decoder_config
    from headrace.models.checkpoint.text_part import text_config

    return decoder_config(text_config(normalized(config)))


def title_of(file: Path, container: "Container") -> str:
    """Return the file's name without a part's number; of a file without a suffix, the name that its header states."""
    if file.suffix.lower() == ".gguf":
        return whole_name(file.name)
    from headrace.models.gguf.metadata import Metadata

    stated = Metadata(container.metadata).optional_text("general.name") or ""
    return "".join(character for character in stated if character.isprintable())[:80] or file.name


def stored_name(title: str, sha256: str) -> str:
    """Return the name of the conversion in the store: the file's stem or name, and part of its digest."""
    stem = title[: -len(".gguf")] if title.lower().endswith(".gguf") else title
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-_") or "model"
    return f"{re.sub(r'[.]{2,}', '.', stem)[:80]}-{sha256[:12]}"


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Convert an OSError of the block to a ModelNotFoundError about the file."""
    try:
        yield
    except OSError as error:
        raise ModelNotFoundError(f"{file} cannot be read: {error.strerror}") from error


def _digest(file: Path, stamp: list[int], store: Store, progress: Progress) -> str:
    """Return the file's sha256, computed once for its path and stamp. Raises CheckpointError and OSError."""
    if isinstance(known := _row(file, stamp, store).get("sha256"), str):
        return known
    count = ByteProgress(progress, "hashing", stamp[0])
    digest = hashlib.sha256()
    sha256 = ""
    for part in parts_of(file):
        sha256 = hash_file(part, count, digest)
    _remember(file, stamp, store, sha256=sha256)
    return sha256


def _stamp(file: Path) -> list[int]:
    """Return size and modification time, of all parts together."""
    stats = [part.stat() for part in present_parts(file)]
    return [sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)]


def _row(file: Path, stamp: list[int], store: Store) -> dict[str, object]:
    """Return the cached facts of the file with this stamp: `sha256`, and the `name` of its conversion."""
    row = _load(store).get(str(file), {})
    return row if row.get("stamp") == stamp else {}


def _remember(file: Path, stamp: list[int], store: Store, **facts: str) -> None:
    """Cache facts of a file with this stamp, beside those that are cached for the same stamp."""
    _save(store, {**_load(store), str(file): {**_row(file, stamp, store), "stamp": stamp, **facts}})


def _load(store: Store) -> dict[str, dict[str, object]]:
    """Return the cached facts by path: {"stamp": [size, time], "sha256": ..., "name": ...}."""
    return {path: row for path, row in read_cache(store.root / _SEEN).items() if isinstance(row, dict)}


def _save(store: Store, seen: dict[str, dict[str, object]]) -> None:
    """Write the cache for the next start, without entries of deleted files."""
    existing = {path: row for path, row in seen.items() if Path(path).exists()}
    write_cache(store.root / _SEEN, existing)


def _stored(row: dict[str, object], store: Store) -> StoredModel | None:
    """Return the model that a cached row names, or None for an invalid row or an entry whose file is gone."""
    try:
        model = store.get(str(row["name"])) if "name" in row else None
    except HeadraceError:
        return None
    return model if model is not None and is_intact(model) else None
