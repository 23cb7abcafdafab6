"""Downloads from the Hugging Face hub into its shared cache, through huggingface_hub.

The revision is resolved to a commit first. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply. Interrupted
downloads resume, and files are compared with the digests that the hub states. Without network the cache is used.

The header is read before the weights: config.json, or the first bytes of a GGUF. A model that nothing here can run is
refused from it, so that no gigabytes are fetched.

Guards: tests/models/registry/test_fetch_hub.py and test_malicious_hub.py.
"""

import glob
import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    errors,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from msgspec import Struct, field

from headrace.models.checkpoint.adapter import CONFIG_FILE, WEIGHT_FILES
from headrace.models.checkpoint.safetensors import refuse_code
from headrace.models.checkpoint.side_file import read_json_object
from headrace.models.checkpoint.split_files import is_gguf
from headrace.models.registry.checksums import ByteProgress, hash_file
from headrace.models.registry.hub_cache import remove_leftovers
from headrace.models.registry.hub_client import (
    Mute,
    bar_class,
    check_commit,
    checked_responses,
    interruptible,
    small_chunks,
)
from headrace.models.registry.hub_files import choose_files
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.config.files import DISK_FULL
from headrace.runtime.errors import (
    CheckpointError,
    FetchError,
    HeadraceError,
    ModelNotFoundError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from headrace.models.gguf.container import Container

_API_TIMEOUT_SECONDS = 15.0  # for a list of files, a small answer
_PART_TIMEOUT_SECONDS = 30.0  # of `HubFile.read`: up to a few megabytes
_KEPT = "run it again: complete files are kept"


class HubFiles(Struct, frozen=True):
    """A downloaded model.

    folder: of its config.json in the hub cache; the snapshot for a GGUF.
    gguf: the first file of a GGUF; None for others.
    licence: as the model's card states it.
    names: its files, relative to `folder`.
    sha256: digests by name, of the files for which the hub states one. Files were verified after their download; those
        that were in the cache before, by whatever put them there.
    """

    repo: str
    commit: str
    folder: Path
    gguf: Path | None
    licence: str | None
    names: Sequence[str] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)


def fetch_hub(hub: HubId, *, progress: Progress = silent) -> HubFiles:
    """Download the files that `choose_files` selects from `hub`, or find them in the cache without network.

    Raises ModelNotFoundError, FetchError (network, permission, damaged download) or CheckpointError (refused files).
    """
    with checked_responses(), small_chunks():
        progress("asking the hub", 0, None)
        info = _model_info(hub, files_metadata=True)
        if info is None:
            return _from_cache(hub)
        with explained(hub):
            return _download(hub, info, progress)


class HubHeader(Struct, frozen=True):
    """Facts of a model that need no weights."""

    size: int | None  # bytes to download; None without network
    licence: str | None
    config: dict[str, object] | None = None  # config.json; None for a GGUF
    container: "Container | None" = None  # of a GGUF, without weights


def fetch_header(hub: HubId) -> HubHeader:
    """Return the config.json of `hub` or the header of its GGUF, from the hub or its cache. Raises as `fetch_hub`."""
    with checked_responses(), small_chunks():
        info = _model_info(hub, files_metadata=True)
        if info is None:
            return _cached_header(hub)
        siblings = _siblings(info)
        with explained(hub):
            names = choose_files(siblings, hub.repo, hub.file, hub.quantization)
            size = sum(siblings[name].size or 0 for name in names)
            licence = _licence(info)
            if (name := _config_of(names)) is None:
                return HubHeader(size, licence, container=_gguf_header(hub, info, names))
            file = hf_hub_download(hub.repo, name, revision=info.sha, tqdm_class=Mute)
            return HubHeader(size, licence, read_json_object(Path(file)))


def _cached_header(hub: HubId) -> HubHeader:
    """Return the header in the hub cache; of a repository of GGUFs only if one is there whole."""
    if hub.file is None and hub.quantization is None:
        with suppress(LocalEntryNotFoundError):
            file = hf_hub_download(hub.repo, "config.json", revision=hub.revision, local_files_only=True)
            return HubHeader(None, None, read_json_object(Path(file)))
    files = _from_cache(hub)
    if files.gguf is None:
        raise unreachable(hub)
    from headrace.models.gguf.container import open_container

    return HubHeader(None, None, container=open_container(files.gguf))


def _gguf_header(hub: HubId, info: ModelInfo, names: Sequence[str]) -> "Container":
    """Return the container of a GGUF's parts without their weights. Raises as `open_container`, and FetchError."""
    from headrace.models.gguf.container import remote_container  # late: numpy
    from headrace.models.gguf.convert import config_tensors

    siblings = _siblings(info)
    files = [HubFile(hub.repo, check_commit(info.sha), name, siblings[name].size or 0) for name in names]
    return remote_container(files, config_tensors)


def _model_info(hub: HubId, *, files_metadata: bool = False) -> ModelInfo | None:
    """Return the hub's facts about the repository at one commit; None if the hub cannot be reached.

    Without network this fails at once; a download would retry for half a minute.
    """
    # huggingface_hub's warnings would break the progress display (docs/workarounds.md). Importing it sets the level, so
    # set it here.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="huggingface_hub")  # of a full disk, which ends the download
    api = HfApi(library_name="headrace")
    with explained(hub):
        try:
            info = api.model_info(
                hub.repo, revision=hub.revision, files_metadata=files_metadata, timeout=_API_TIMEOUT_SECONDS
            )
        except Exception as error:
            if is_offline(error):
                return None
            raise
        check_commit(info.sha)
        return info


def _download(hub: HubId, info: ModelInfo, progress: Progress) -> HubFiles:
    """Check a model's header, then download its files. Files that were in the cache before are not verified again."""
    siblings = _siblings(info)
    names = choose_files(siblings, hub.repo, hub.file, hub.quantization)
    commit = check_commit(info.sha)
    cached = {name for name in names if isinstance(try_to_load_from_cache(hub.repo, name, revision=commit), str)}
    # Models that nothing here can run are refused before gigabytes are fetched.
    if (name := _config_of(names)) is not None:
        config = Path(hf_hub_download(hub.repo, name, revision=commit, tqdm_class=Mute))
        if name not in cached:
            _verify(config, siblings[name], progress)
        content = read_json_object(config)
        refuse_code(content)
        check_config(content)
        cached.add(name)
    elif cached != set(names):
        from headrace.models.gguf.convert import plan_of

        progress("reading the header", 0, None)
        with suppress(WholeFilesError):  # without the check before the download
            plan_of(_gguf_header(hub, info, names))
    folder = _download_files(hub, info, names, cached, progress)
    stated = {name: lfs.sha256 for name in names if (lfs := siblings[name].lfs) is not None}
    return _hub_files(hub, commit, folder, names, _licence(info), stated)


def fetch_adapter(hub: HubId, progress: Progress, *, fetch: bool = True) -> Path:
    """Download the files of an adapter, or find them in the cache; return their folder, or the GGUF file.

    fetch=False asks only the cache. Raises as `fetch_hub`.
    """
    with checked_responses(), small_chunks():
        info = _model_info(hub, files_metadata=True) if fetch else None
        if info is None:
            try:
                folder, cached_names = _snapshot(hub)
                names = _adapter_files(cached_names, hub)
            except (OSError, ValueError, HeadraceError) as error:
                raise unreachable(hub) from error
            return _adapter_at(folder, names)
        names = _adapter_files(list(_siblings(info)), hub)
        cached = {name for name in names if isinstance(try_to_load_from_cache(hub.repo, name, revision=info.sha), str)}
        with explained(hub):
            folder = _download_files(hub, info, names, cached, progress)
            # Downloads by commit leave no branch in the cache; without network the branch is looked up there.
            branch = folder.parents[1] / "refs" / (hub.revision or "main")
            branch.parent.mkdir(parents=True, exist_ok=True)
            branch.write_text(check_commit(info.sha))
            return _adapter_at(folder, names)


def _adapter_at(folder: Path, names: Sequence[str]) -> Path:
    """Return what of a snapshot is the adapter: its only file, a GGUF, or the folder of config and weights."""
    return folder / names[0] if len(names) == 1 else folder


def _adapter_files(names: Sequence[str], hub: HubId) -> list[str]:
    """Return config and weights of an adapter among these files; or its GGUF, if the hub id names it or all are GGUFs.

    Raises ModelNotFoundError and CheckpointError.
    """
    folder = [name for name in (CONFIG_FILE, *WEIGHT_FILES) if name in names]
    if hub.file is None and hub.quantization is None and CONFIG_FILE in folder and len(folder) > 1:
        return folder
    if hub.file is not None or any(map(is_gguf, names)):
        chosen = choose_files(names, hub.repo, hub.file, hub.quantization)
        if len(chosen) == 1 and is_gguf(chosen[0]):
            return chosen
    raise CheckpointError(f"{hub} has no adapter that headrace reads: {CONFIG_FILE} and .safetensors, or a .gguf file")


def _download_files(hub: HubId, info: ModelInfo, names: Sequence[str], cached: set[str], progress: Progress) -> Path:
    """Download files of one commit into the hub's cache, and verify those that were not in it; return their folder."""
    siblings = _siblings(info)
    sizes = {name: siblings[name].size or 0 for name in names}
    bar = bar_class(progress, sum(sizes[name] for name in cached), sum(sizes.values()))
    folder = Path(
        interruptible(
            lambda: snapshot_download(
                hub.repo,
                revision=info.sha,
                allow_patterns=[glob.escape(name) for name in names],
                tqdm_class=bar,
            ),
            bar,
        )
    )
    for name in names:
        if name not in cached:
            _verify(folder / name, siblings[name], progress)
    remove_leftovers(folder / name for name in names)
    return folder


def _from_cache(hub: HubId) -> HubFiles:
    """Return the files in the hub cache from an earlier download by headrace or another tool."""
    try:
        folder, cached_names = _snapshot(hub)
        names = choose_files(cached_names, hub.repo, hub.file, hub.quantization)
    except (OSError, ValueError, HeadraceError) as error:
        raise unreachable(hub) from error
    return _hub_files(hub, folder.name, folder, names)


def _snapshot(hub: HubId) -> tuple[Path, list[str]]:
    """Return the folder of a repository in the hub cache, and its files. Raises OSError and ValueError."""
    # Ask for no file: headrace caches a selection of files, other tools whole repositories.
    folder = Path(snapshot_download(hub.repo, revision=hub.revision, local_files_only=True, allow_patterns=[]))
    return folder, [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _hub_files(
    hub: HubId,
    commit: str,
    snapshot: Path,
    names: Sequence[str],
    licence: str | None = None,
    sha256: Mapping[str, str] = MappingProxyType({}),
) -> HubFiles:
    """Return the model in a snapshot of a repository; it may be in a folder of it."""
    config = _config_of(names)
    if config is None:
        return HubFiles(hub.repo, commit, snapshot, snapshot / names[0], licence, names, sha256)
    at = config.removesuffix("config.json")  # "", or the folder with a slash
    sha256 = {name.removeprefix(at): digest for name, digest in sha256.items()}
    return HubFiles(hub.repo, commit, snapshot / at, None, licence, [name.removeprefix(at) for name in names], sha256)


def _siblings(info: ModelInfo) -> dict[str, RepoSibling]:
    """Return the files of a repository by name, with the facts that the hub states."""
    return {sibling.rfilename: sibling for sibling in info.siblings or []}


def _config_of(names: Sequence[str]) -> str | None:
    """Return the config.json among a model's files, which is in the folder of the weights; None for a GGUF."""
    return min((name for name in names if f"/{name}".endswith("/config.json")), key=len, default=None)


def _licence(info: ModelInfo) -> str | None:
    """Return the licence that a model's card names."""
    card = getattr(info, "card_data", None)
    named = getattr(card, "license_name", None) or getattr(card, "license", None)
    return str(named) if named else None


def _verify(path: Path, stated: RepoSibling, progress: Progress) -> None:
    """Compare a file with the hub's digest: sha256 for LFS files, the git blob id for others.

    A file that differs is deleted from the cache, and FetchError is raised.
    """
    size = path.stat().st_size
    if stated.lfs is not None:
        computed = hash_file(path, ByteProgress(progress, "verifying", size))
        expected: str | None = stated.lfs.sha256
    else:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        computed = hash_file(path, ByteProgress(silent, "", size), digest)
        expected = stated.blob_id
    if expected is not None and computed != expected:
        path.resolve().unlink()  # the blob, which the next run would trust
        path.unlink()
        raise FetchError(f"{path.name} is damaged: its digest is not the one the hub states", "run it again")


def unreachable(hub: HubId) -> FetchError:
    """Return the error for a repository that is neither reachable nor cached."""
    if constants.HF_HUB_OFFLINE:
        return FetchError(
            f"cannot fetch {hub}: HF_HUB_OFFLINE is set, and the local cache has no complete copy",
            "unset HF_HUB_OFFLINE, or pass a local directory or .gguf file",
        )
    return FetchError(
        f"cannot fetch {hub}: the hub cannot be reached, and the local cache has no complete copy",
        "check the network (HF_ENDPOINT and proxies apply), or pass a local directory or .gguf file",
    )


def is_offline(error: Exception) -> bool:
    """Return whether there was no response at all. Matches by name: the HTTP library differs between releases."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OfflineModeIsEnabled) or "TransportError" in kinds


@contextmanager
def explained(hub: HubId) -> Iterator[None]:
    """Convert exceptions of the block to headrace's errors."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        raise explain(error, hub) from error


def explain(error: Exception, hub: HubId) -> HeadraceError:
    """Return the error to raise for one of huggingface_hub's or its HTTP library's."""
    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{hub.repo} is gated: its terms have to be accepted first",
            f"accept them at https://huggingface.co/{hub.repo}, then log in (`hf auth login`) or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{hub.repo} has no revision {hub.revision}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model {hub.repo}, or it is private",
            "check the spelling; for a private one log in (`hf auth login`) or set HF_TOKEN",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or is_offline(error):
        return FetchError(f"the connection to the hub broke while fetching {hub}", _KEPT)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        hint = "the token in use is not accepted: check HF_TOKEN" if status in {401, 403} else "try again later"
        return FetchError(f"the hub answered {status} for {hub}", hint)
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{hub} is not a name the hub allows")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return FetchError(
            f"no space left in the hub's cache {constants.HF_HUB_CACHE} for {hub}",
            "make room, or set HF_HOME to a folder on another disk; complete files are kept",
        )
    reason = "".join(character if character.isprintable() else " " for character in str(error))[:200]
    return FetchError(f"fetching {hub} failed: {reason}", _KEPT)


class WholeFilesError(FetchError):
    """The hub ignores ranges, and a part that was asked for is not at the beginning of the file."""


class HubFile(Struct, frozen=True):
    """A file of one commit that is read in parts. size: bytes, as the hub states them."""

    repo: str
    commit: str
    name: str
    size: int

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start`. Raises FetchError if the hub sends fewer, and the client's errors."""
        url = hf_hub_url(self.repo, self.name, revision=self.commit)
        headers = {**build_hf_headers(library_name="headrace"), "Range": f"bytes={start}-{start + count - 1}"}
        with get_session().stream("GET", url, headers=headers, timeout=_PART_TIMEOUT_SECONDS) as response:
            hf_raise_for_status(response)
            # Without 206 (partial content) the whole file follows. A part at its beginning is read from it.
            if response.status_code != 206 and start:
                raise WholeFilesError(f"the hub does not send parts of {self.name}")
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) >= count:
                    break
        if len(content) < count:
            raise FetchError(f"the hub sent {len(content)} of {count} bytes of {self.name}", "run it again")
        return bytes(content[:count])


def check_config(config: Mapping[str, object]) -> None:
    """Raise UnsupportedModelError for a config.json that neither headrace's decoder nor mlx-lm's classes run.

    Also raises CheckpointError for broken values. Only the method of quantization is checked: the rest needs tensors.
    """
    from headrace.models.checkpoint.foreign.formats import recognise
    from headrace.models.cost.shape_sources import has_shape

    try:
        recognise(config, {})
    except UnsupportedModelError:
        raise
    except CheckpointError:  # about tensors, which are not known yet
        pass
    if not has_shape(config):
        from headrace.models.checkpoint.normalize import normalized
        from headrace.models.mlx_lm.load import of_config  # half a second of imports

        # `of_config` makes the class, which raises for a config that it does not run.
        plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
        of_config(normalized(plain))
