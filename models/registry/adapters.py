"""Adapters in a model's name: BASE+ADAPTER, with a folder, a hub repository or a .gguf file after the plus sign.

smollm2-135m+./my-lora     org/base+org/lora     /models/base+~/lora     base.gguf+lora.gguf     a.gguf+org/b:F16

Guard: tests/models/registry/test_other_programs.py.
"""

import os
import shutil
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from headrace.models.checkpoint.adapter import CONFIG_FILE, Adapter, open_adapter
from headrace.models.checkpoint.gguf_link import file_facts
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.import_gguf import gguf_of
from headrace.models.registry.progress import Progress
from headrace.models.registry.source import parse_source, path_exists
from headrace.models.registry.store import StoredModel
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.errors import HeadraceError, ModelNotFoundError, UnsupportedModelError, UsageError
from headrace.runtime.machine.peaks import RECENT_DAYS


def split_adapter(text: str) -> tuple[str, str | None]:
    """Return a model's name, and that of the adapter after it, if any. An existing path has none.

    The base may be a path with plus signs: the longest one that exists. Otherwise the adapter follows the first plus.
    """
    base, plus, adapter = text.partition("+")
    if not plus or path_exists(text):
        return text, None
    end = text.rfind("+")
    while end > 0:
        if path_exists(text[:end]):
            base = text[:end]
            adapter = text[end + 1 :]
            break
        end = text.rfind("+", 0, end)
    if not base or not adapter:
        raise UsageError(f"{text!a} lacks a model before the plus sign, or an adapter after it")
    return base, adapter


def name_with(base: str, adapter: str) -> str:
    """Return the display name of a model with an adapter: `qwen3-4b+lora`."""
    return f"{base}+{PurePath(adapter).name}"


def find_adapter(text: str, progress: Progress, *, fetch: bool) -> Adapter | Path:
    """Return the adapter that a text names: a folder, a repository of the hub, or a GGUF file, which stays a path.

    Raises ModelNotFoundError, FetchError, UsageError, and what `open_adapter` raises.
    """
    if path_exists(text):
        path = Path(text).expanduser().absolute()
        if path.is_dir() and not (path / CONFIG_FILE).is_file():
            raise ModelNotFoundError(f"{path} has no {CONFIG_FILE}, so it is not an adapter")
    else:
        hub = parse_source(text)
        if not isinstance(hub, HubId):
            raise ModelNotFoundError(
                f"no adapter {text!a}", "pass its folder, its .gguf file or its repository on the hub, org/name"
            )
        from headrace.models.registry.fetch_hub import fetch_adapter  # late: imports huggingface_hub

        path = fetch_adapter(hub, progress, fetch=fetch)
    if path.is_file():
        return path
    return open_adapter(path)


def converted(adapter: Path, base: StoredModel | None) -> Adapter:
    """Return the adapter of a GGUF file, in a folder of some megabytes that is made once for its base.

    Folders that were not used in the last RECENT_DAYS are deleted when another one is made.
    base: the store's entry of the model, None for a model outside. Raises UnsupportedModelError for an adapter without
    the GGUF file of its base, HeadraceError if it cannot be written, and what `convert_adapter` raises.
    """
    file = None if base is None else gguf_of(base)
    if file is None:
        raise UnsupportedModelError(
            f"{adapter.name} is an adapter in a GGUF file, which changes a model in a GGUF file",
            f"pass that file before it: BASE.gguf+{adapter.name}",
        )
    key = blake2b(digest_size=16)
    for part in (adapter, file):
        key.update(f"{part.resolve()} {file_facts(part)}\n".encode())
    folder = cache_dir() / "adapters" / key.hexdigest()
    if folder.is_dir():
        with suppress(OSError):  # a cache that cannot be written
            os.utime(folder)
        return open_adapter(folder)
    _delete_unused(folder.parent)
    from headrace.models.gguf.adapter import convert_adapter  # late: numpy and MLX

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as made:
            convert_adapter(adapter, file, Path(made))
            with suppress(OSError):  # another process made it meanwhile
                Path(made).rename(folder)
                Path(made).mkdir()  # for the end of the block
    except OSError as error:
        raise HeadraceError(f"{folder.parent} cannot be written: {error.strerror or error}") from error
    return open_adapter(folder)


def _delete_unused(folder: Path) -> None:
    """Delete the converted adapters that were not used recently, and what interrupted conversions left."""
    oldest = time.time() - RECENT_DAYS * 86400
    with suppress(OSError):  # no folder yet, or one that cannot be written
        for entry in folder.iterdir():
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry)
