"""Parsing of a model argument (`-m`) into one of four kinds.

Of a model's file, at most the first four bytes are read; an adapter's folder is checked, to name its base in the error.

    parse_source("qwen3-4b"), "qwen3:4b"                     -> CatalogName
    parse_source("./my-model"), "~/m", "file:///models/m"    -> LocalDirectory
    parse_source("model.Q4_K_M.gguf"), "blobs/sha256-0123"   -> LocalGGUF
    parse_source("mlx-community/Qwen3-4B-4bit@main")         -> HubId
    "org/name:Q4_K_M", "org/name/file.gguf", "org/name/folder", "https://huggingface.co/org/name"

An existing path takes precedence. Text that starts with `/`, `./`, `../` or `~` must be an existing path. So must text
that ends in `.gguf`, unless it is an address of the hub, or org/name/file.gguf and no folder `org` is here. Catalog
names and hub ids are not checked for existence.

Guard: tests/models/registry/test_source.py.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from headrace.models.checkpoint.adapter import CONFIG_FILE, open_adapter
from headrace.models.checkpoint.side_file import check_name
from headrace.models.checkpoint.split_files import first_parts, is_gguf
from headrace.models.registry.hub_id import FORMS, HubId, parse_hub_id, parse_hub_url, shorten
from headrace.runtime.errors import ModelNotFoundError, UsageError

_CATALOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# A name of Ollama's, `qwen3:4b`: model, tag.
_TAGGED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,60}):([A-Za-z0-9][A-Za-z0-9._-]{0,30})")
# https://hf.co/org/name, huggingface.co/org/name, hf://org/name: the path, if any.
_HUB_URL = re.compile(
    r"(?i:https?://(?:www\.)?(?:huggingface\.co|hf\.co)|(?:huggingface\.co|hf\.co)|hf:/)(?:/(.*))?", re.DOTALL
)
# Hosts of models that are not fetched from there, and a hint for each.
_ELSEWHERE = {
    "hf-mirror.com": "to use this mirror of the hub, set HF_ENDPOINT=https://hf-mirror.com and pass org/name",
    "modelscope.cn": "download it with ModelScope's own program, then pass its folder or .gguf file",
    "modelscope.ai": "download it with ModelScope's own program, then pass its folder or .gguf file",
    "ollama.com": "a model that Ollama has pulled runs by its name there, `headrace list` names them; "
    "or take the model from the hub",
    "registry.ollama.ai": "a model that Ollama has pulled runs by its name there, `headrace list` names them",
}
# Likewise of addresses that begin with a scheme.
_SCHEMES = {
    "file": "pass the path itself, or file:///PATH",
    "lmstudio": "a model in LM Studio's folder runs by its name there, `headrace list` names them",
    "modelscope": _ELSEWHERE["modelscope.cn"],
    "ms": _ELSEWHERE["modelscope.cn"],
    "ollama": _ELSEWHERE["ollama.com"],
}
# ollama://llama3: scheme.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20})://.*", re.DOTALL)
# https://www.modelscope.cn:443/models, ollama.com/library: scheme if any, host.
_ADDRESS = re.compile(r"(https?://)?(?:www\.)?([A-Za-z0-9.-]+)(?::\d+)?(?:[/?#].*)?", re.DOTALL)
# file:///models/m, file://localhost/models/m, file:/models/m: the path.
_FILE_URL = re.compile(r"file:(?://(?:localhost)?|(?!//))(/.*)", re.DOTALL)
# The end of a tag: `-q4_K_M` of 3b-instruct-q4_K_M, `-mxfp4`.
_TAG_OF_4_BITS = re.compile(r"-(i?q4|mxfp4)\w*$", re.IGNORECASE)
INSTRUCT = re.compile(r"-(instruct|chat|it)$", re.IGNORECASE)


class CatalogName(Struct, frozen=True):
    """A bare word: the name of a catalog entry or of a stored model."""

    name: str


class LocalDirectory(Struct, frozen=True):
    """An existing directory with a config.json, absolute."""

    path: Path


class LocalGGUF(Struct, frozen=True):
    """An existing .gguf file, absolute. adapter: the GGUF file of an adapter that Ollama applies to it."""

    path: Path
    adapter: Path | None = None


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
    if (file_url := _FILE_URL.fullmatch(text.strip())) is not None:
        text = unquote(file_url[1])
    try:
        if not Path(text).expanduser().exists():
            text = text.strip()  # copied with the spaces around it
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # name too long, unknown ~user
        raise UsageError(f"not a usable model name or path: {shorten(text)}") from error
    # A bare word is a path only if a model is there, so that an unrelated folder does not hide a catalog entry.
    if exists and (_looks_like_path(text) or "/" in text or _is_model(path)):
        return _local(path)
    page = _hub_page(text)
    if page is not None:
        return parse_hub_url(page)
    _refuse_other_hosts(text)
    if _looks_like_path(text) and os.path.lexists(path):
        raise ModelNotFoundError(
            f"{shorten(text)} is a link to a file that does not exist", "pass the path of the file itself"
        )
    if _looks_like_path(text) and not _in_a_repository(text):
        raise ModelNotFoundError(f"no such file or directory: {shorten(text)}")
    if "/" in text.rstrip("/"):
        return parse_hub_id(text.rstrip("/"))
    if _CATALOG_NAME.fullmatch(text):
        return CatalogName(text)
    if text.endswith("/") and (known := _respelled(text.rstrip("/"))) is not None:
        return CatalogName(known)  # completed by a shell to a folder of that name
    if (tagged := _TAGGED.fullmatch(text)) is not None:
        return CatalogName(_with_tag(tagged[1], tagged[2]))
    raise UsageError(f"not a model name, path or hub id: {shorten(text)}", f"{FORMS}; a path starts with ./ or /")


def path_exists(text: str) -> bool:
    """Return whether a text is the path of an existing file or folder; `~` is allowed."""
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # name too long, unknown ~user, NUL
        return False


def _hub_page(text: str) -> str | None:
    """Return the path in an address of the hub, or of the mirror that HF_ENDPOINT names; None for another text."""
    url = _HUB_URL.fullmatch(text)
    if url is not None:
        return url[1] or ""
    mirror = os.environ.get("HF_ENDPOINT", "").rstrip("/")  # https://hf-mirror.com
    host = mirror.partition("://")[2]
    for start in (mirror, host):
        rest = text[len(start) :]
        if host and text[: len(start)].lower() == start.lower() and rest[:1] in ("", "/"):
            return rest[1:]
    return None


def _refuse_other_hosts(text: str) -> None:
    """Raise UsageError with the way to use a model for the address of a host that is not the hub."""
    scheme = _SCHEME.fullmatch(text)
    if scheme is not None and (kind := scheme[1].lower()) not in {"http", "https"}:
        hint = _SCHEMES.get(kind, "download its file or folder, and pass that")
        raise UsageError(f"models are not fetched from {kind}:// addresses", hint)
    address = _ADDRESS.fullmatch(text)
    if address is None:
        return
    host = address[2].lower()
    if not (address[1] or host in _ELSEWHERE):
        return
    hint = _ELSEWHERE.get(host, "download its file or folder, and pass that")
    raise UsageError(f"models are not fetched from {host}", hint)


def _with_tag(name: str, tag: str) -> str:
    """Return the catalog's name for `qwen3:4b` or `llama3.2:3b-instruct-q4_K_M`; `name-tag` if there is none.

    The catalog's models follow instructions, and most have 4 bits: tags of other formats name none of them.
    """
    if tag == "latest":
        return _respelled(name) or name
    shorter = _TAG_OF_4_BITS.sub("", tag)
    names = (_respelled(f"{name}-{each}") for each in (tag, shorter, INSTRUCT.sub("", shorter)))
    return next((known for known in names if known is not None), f"{name}-{tag}")


def _respelled(name: str) -> str | None:
    from headrace.models.registry.catalog import respelled  # late: reads the catalog

    return respelled(name)


def _looks_like_path(text: str) -> bool:
    """Return whether a text is written as a path, or as a .gguf file's name."""
    return text.startswith(("/", "./", "../", "~")) or text in {".", ".."} or text.lower().endswith(".gguf")


def _is_model(path: Path) -> bool:
    """Return whether a path is a file, or a folder with one model."""
    return path.is_file() or (path / "config.json").is_file() or len(_ggufs(path)) == 1


def _ggufs(directory: Path) -> list[Path]:
    """Return the GGUF models of a directory, of a split one only the first part; no vision parts next to them."""
    try:
        names = sorted(entry.name for entry in directory.iterdir() if is_gguf(entry.name))
    except OSError:  # no directory, or one that cannot be read
        return []
    return [directory / name for name in first_parts(names)]


def _local(path: Path) -> LocalDirectory | LocalGGUF:
    """Return the model at an existing path. Raises ModelNotFoundError, with a path to pass instead, if it is none."""
    path = path.absolute()
    check_name(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return LocalDirectory(path)
        ggufs = _ggufs(path)
        if len(ggufs) == 1:
            return LocalGGUF(ggufs[0])
        if (path / CONFIG_FILE).is_file():
            base = open_adapter(path).base
            wanted = f", made for {base}" if base else ""
            raise ModelNotFoundError(f"{path} is an adapter{wanted}", f"pass it after its base: BASE+{path}")
        hint = "pass the folder with config.json and the weights, or a .gguf file"
        if ggufs:
            hint = f"it has {len(ggufs)} .gguf files: pass one, for example {ggufs[0]}"
        raise ModelNotFoundError(f"{path} has no config.json, so it is not a model directory", hint)
    if path.suffix.lower() == ".gguf" or _begins_as_gguf(path):
        return LocalGGUF(path)
    if path.suffix == ".safetensors":
        raise ModelNotFoundError(
            f"{path.name} has only weights", f"pass its directory, which also has the config: {path.parent}"
        )
    raise ModelNotFoundError(f"{path} is neither a model directory nor a .gguf file")


def _begins_as_gguf(path: Path) -> bool:
    """Return whether a file under any name, such as those of Ollama's store, is a GGUF by its first bytes."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _in_a_repository(text: str) -> bool:
    """Return whether `text` may be org/name/file.gguf on the hub: its first folder does not exist here."""
    parts = text.split("/")
    return len(parts) > 2 and parts[0] not in {"", ".", "..", "~"} and not Path(parts[0]).expanduser().exists()
