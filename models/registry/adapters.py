"""Adapters beside a model's name: BASE+ADAPTER, with a folder or a hub repository behind the plus sign.

smollm2-135m+./my-lora     org/base+org/lora     /models/base+~/lora
"""

from pathlib import Path, PurePath

from headrace.models.checkpoint.adapter import open_adapter
from headrace.models.registry.progress import Progress
from headrace.models.registry.source import HubId, parse_source
from headrace.runtime.errors import ModelNotFoundError, UsageError


def split_adapter(text: str) -> tuple[str, str | None]:
    """Return a model's name, and that of the adapter behind it, if any. An existing path has none."""
    base, plus, adapter = text.partition("+")
    if not plus or Path(text).expanduser().exists():
        return text, None
    if not base or not adapter:
        raise UsageError(f"{text!a} lacks a model before the plus sign, or an adapter behind it")
    return base, adapter


def name_with(base: str, adapter: str) -> str:
    """Return the display name of a model with an adapter: `qwen3-4b+lora`."""
    return f"{base}+{PurePath(adapter).name}"


def find_adapter(text: str, progress: Progress, *, fetch: bool) -> Path:
    """Return the folder of an adapter, from the hub if it is a repository's name.

    Raises ModelNotFoundError, FetchError, UsageError, and what `open_adapter` raises.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        folder = path.absolute()
    else:
        hub = parse_source(text)
        if not isinstance(hub, HubId):
            raise ModelNotFoundError(f"no adapter {text!a}", "pass its folder or its repository on the hub, org/name")
        from headrace.models.registry.fetch_hub import fetch_adapter  # late: imports huggingface_hub

        folder = fetch_adapter(hub, progress, fetch=fetch)
    open_adapter(folder)
    return folder
