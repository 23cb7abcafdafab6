"""A repository on the hub, and how people write one: an id or an address.

    parse_hub_id("org/name:Q4_K_M@main")                 repository, quantization, revision
    parse_hub_url("org/name/blob/main/m.gguf")           the path of a pasted address: repository, file

Nothing is asked of the hub. `source.py` decides which texts come here (tests/models/registry/test_source.py). Entries
of the catalog name their repositories by a `HubId`, too.
"""

import re
from pathlib import Path
from urllib.parse import parse_qs, unquote

from msgspec import Struct

from headrace.runtime.errors import ModelNotFoundError, UsageError

# "Qwen3-0.6B": names as the hub allows them, without a leading or trailing separator. `_is_repo_part` adds: no "..".
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
# Branches, tags, commit hashes and pull request refs such as refs/pr/1.
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,254}[A-Za-z0-9_])?")
COMMIT = re.compile(r"[0-9a-f]{40}")
"""The hash of a revision."""
# "Q4_K_M", after the colon of an id.
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")
_TREES = ("tree", "blob", "resolve", "raw")  # a revision and a path follow
FORMS = "a hub id looks like org/name, org/name:Q4_K_M, org/name/file.gguf or org/name@revision"


class HubId(Struct, frozen=True):
    """A model repository on the hub; `revision` is None for its default branch.

    repo: "org/name", or an old "name".
    file: the .gguf file to use, or the folder of the model.
    quantization: that of the .gguf file, in capitals; beside a folder, of the file in it.
    """

    repo: str
    revision: str | None = None
    file: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        text = self.repo
        if self.file:
            text += f"/{self.file}"
        if self.quantization:
            text += f":{self.quantization}"
        if self.revision:
            text += f"@{self.revision}"
        return text


def parse_hub_id(text: str) -> HubId:
    """Parse org/name or org/name/FOLDER, with :QUANTIZATION or without, or org/name/FILE.gguf; any with @REVISION."""
    repository, at, revision = text.partition("@")
    repository, colon, quantization = repository.partition(":")
    org, _, rest = repository.partition("/")
    name, slash, file = rest.partition("/")
    is_gguf = file.lower().endswith(".gguf")
    if slash and not is_gguf and Path(org).is_dir():
        raise ModelNotFoundError(f"no such file or directory: {shorten(text)}")
    malformed = (
        any(not _is_repo_part(part) for part in (org, name))
        or (slash and not _is_file_name(file))
        or (is_gguf and colon)
        or (colon and _QUANTIZATION.fullmatch(quantization) is None)
        or (at and not _is_revision(revision))
    )
    if malformed:
        raise UsageError(f"not a hub id: {shorten(text)}", FORMS)
    kind: str | None = quantization.upper()
    if kind in ("", "LATEST"):  # "latest" is the tag of Ollama's names for no choice
        kind = None
    return HubId(f"{org}/{name}", revision or None, file or None, kind)


def _is_repo_part(part: str) -> bool:
    return _REPO_PART.fullmatch(part) is not None and ".." not in part and "--" not in part


def _is_revision(revision: str) -> bool:
    return _REVISION.fullmatch(revision) is not None and ".." not in revision and "//" not in revision


def _is_file_name(path: str) -> bool:
    return path.isprintable() and all(part not in {"", ".", ".."} for part in path.split("/"))


def parse_hub_url(path: str) -> HubId:
    """Parse the path of an address: of a model's page, of one of its branches, or of one of its files.

        org/name                       the model
        org/name/tree/REVISION/FOLDER  a folder of a revision, or without FOLDER the model
        org/name/blob/REVISION/m.gguf  a file; another one than a .gguf stands for its model
        org/name/discussions           another tab of the page, for the model
        org/name?show_file_info=m.gguf a file whose facts the page shows
        gpt2/tree/main                 an old model, without an organisation

    Raises UsageError for the hub itself, a data set, a space, and what `parse_hub_id` refuses.
    """
    path, _, query = path.partition("#")[0].partition("?")
    path = path.strip("/")
    if not path:
        raise UsageError("this is the hub's own address, which names no model", "paste the address of a model's page")
    if path.partition("/")[0] in {"datasets", "spaces"}:
        raise UsageError(f"{shorten(path)} is no model", "paste the address of a model's page")

    # The repository, and the path below its page.
    parts = path.split("/")
    if len(parts) == 1 or parts[1] in _TREES:  # without an organisation
        repo = parts[0]
        rest = parts[1:]
    else:
        repo = "/".join(parts[:2])
        rest = parts[2:]
    kind = ""
    revision = ""
    file = ""
    if rest and rest[0] in _TREES:  # else another tab
        kind, *below = rest
        revision = "".join(below[:1])  # "" where the address ends before it
        file = unquote("/".join(below[1:])).strip("/")
    shown_file = parse_qs(query).get("show_file_info", [""])[0]
    if shown_file.lower().endswith(".gguf"):
        file = shown_file.strip("/")
    at = ""
    if revision not in {"", "main"}:
        at = f"@{unquote(revision)}"
    if kind != "tree" and not file.lower().endswith(".gguf"):
        file = ""
    # A repository without an organisation is no id that `parse_hub_id` takes, so it is checked here.
    if "/" in repo:
        return parse_hub_id(f"{repo}/{file}{at}" if file else f"{repo}{at}")
    malformed = not _is_repo_part(repo) or (at and not _is_revision(at[1:])) or (file and not _is_file_name(file))
    if malformed:
        raise UsageError(f"not a hub id: {shorten(path)}", FORMS)
    return HubId(repo, at[1:] or None, file or None)


def shorten(text: str) -> str:
    """Return `text` escaped and shortened for a one-line message."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= 120 else shown[:117] + "..."
