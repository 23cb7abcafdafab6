"""Fetching models from the hub through huggingface_hub, into the hub's own shared cache.

The revision is resolved to a commit first, so one model is one commit. The user's HF_ENDPOINT, HF_HOME, HF_TOKEN
and HF_HUB_OFFLINE apply; a connection that breaks is taken up where it broke, a download that was ended keeps the
files it had whole; large files are compared with the sha256 the hub states. Without network, what the cache already has
is used.

    fetch_hub(HubId("org/name")) -> HubFiles(commit, folder, gguf or None, licence)
"""

import glob
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headrace.models.checkpoint.json_object import read_json_object
from headrace.models.checkpoint.safetensors import refuse_code
from headrace.models.registry.hub_cache import remove_leftovers
from headrace.models.registry.hub_files import choose_files
from headrace.models.registry.hub_guard import check_commit, only_sound_answers
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.source import HubId
from headrace.runtime.errors import FetchError, HeadraceError, ModelNotFoundError
from headrace.runtime.machine.background import run_in_background

_API_TIMEOUT_SECONDS = 15.0
_CHUNK = 4 << 20
_DOWNLOAD_CHUNK = 256 << 10
_SLACK_BYTES = 32 << 20  # beyond what the hub says a download has: more is one without an end
_KEPT = "run it again: files that are whole are kept"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class HubFiles:
    """A downloaded model: a snapshot folder of the hub cache, and the one GGUF in it if it is a GGUF repository."""

    repo: str
    commit: str
    folder: Path
    gguf: Path | None
    licence: str | None
    names: Sequence[str] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of the files whose digest the hub states, compared after their download."""


def fetch_hub(hub: HubId, *, file: str | None = None, progress: Progress = silent) -> HubFiles:
    """Download what `choose_files` picks from `hub`, or find it in the cache when there is no network.

    Raises ModelNotFoundError, FetchError (network, permission, damaged download) or CheckpointError (not a model we
    may open).
    """
    with only_sound_answers(), _small_chunks():
        return _fetch(hub, file, progress)


def _fetch(hub: HubId, file: str | None, progress: Progress) -> HubFiles:
    api = _api()
    # Its warnings ("Trying to resume download...") would tear up the progress display. Importing sets its level.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        progress("asking the hub", 0, None)
        info = api.model_info(hub.repo, revision=hub.revision, files_metadata=True, timeout=_API_TIMEOUT_SECONDS)
        check_commit(info.sha)
    except HeadraceError:
        raise
    except Exception as error:
        if not _is_offline(error):
            raise _explain(error, hub) from error
        return _from_cache(hub, file)
    try:
        return _download(hub, info, file, progress)
    except HeadraceError:
        raise
    except Exception as error:
        raise _explain(error, hub) from error


def fetch_config(hub: HubId) -> dict[str, Any]:
    """config.json of `hub` and nothing else, from the hub or its cache. Raises as `fetch_hub` does."""
    with only_sound_answers():
        return _fetch_config(hub)


def _fetch_config(hub: HubId) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    api = _api()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    commit, offline = hub.revision, False
    try:
        # Without network this fails at once, where the download would try for half a minute.
        commit = check_commit(api.model_info(hub.repo, revision=hub.revision, timeout=_API_TIMEOUT_SECONDS).sha)
    except HeadraceError:
        raise
    except Exception as error:
        offline = _is_offline(error)
        if not offline:
            raise _explain(error, hub) from error
    try:
        path = hf_hub_download(hub.repo, "config.json", revision=commit, local_files_only=offline, tqdm_class=_Mute)
    except LocalEntryNotFoundError as error:
        raise _unreachable(hub) from error
    except HeadraceError:
        raise
    except Exception as error:
        raise _explain(error, hub) from error
    return read_json_object(Path(path))


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="headrace")


def _download(hub: HubId, info: Any, file: str | None, progress: Progress) -> HubFiles:
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache

    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    names = choose_files(siblings, hub.repo, file)
    commit = info.sha
    cached = {name for name in names if isinstance(try_to_load_from_cache(hub.repo, name, revision=commit), str)}
    if "config.json" in names:  # a few hundred bytes decide whether gigabytes are worth fetching
        config = Path(hf_hub_download(hub.repo, "config.json", revision=commit, tqdm_class=_Mute))
        if "config.json" not in cached:
            _verify(config, siblings["config.json"], progress)
        refuse_code(read_json_object(config))
        cached.add("config.json")
    sizes = {name: siblings[name].size or 0 for name in names}
    bar = _bar_class(progress, sum(sizes[name] for name in cached), sum(sizes.values()))
    folder = Path(
        _interruptible(
            lambda: snapshot_download(
                hub.repo,
                revision=commit,
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
    gguf = folder / names[0] if names[0].endswith(".gguf") else None
    stated = {name: str(siblings[name].lfs.sha256) for name in names if siblings[name].lfs is not None}
    return HubFiles(hub.repo, commit, folder, gguf, _licence(info), names, stated)


def _from_cache(hub: HubId, file: str | None) -> HubFiles:
    """What an earlier download, ours or another tool's, left in the hub cache."""
    from huggingface_hub import snapshot_download

    try:
        # Only the file all models have is asked for: other tools cache whole repositories, we do not.
        folder = Path(
            snapshot_download(hub.repo, revision=hub.revision, local_files_only=True, allow_patterns=["config.json"])
        )
        names = choose_files(
            (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()), hub.repo, file
        )
    except (OSError, ValueError, HeadraceError) as error:
        raise _unreachable(hub) from error
    gguf = folder / names[0] if names[0].endswith(".gguf") else None
    return HubFiles(hub.repo, folder.name, folder, gguf, None, names)


def _licence(info: Any) -> str | None:
    card = getattr(info, "card_data", None)
    named = getattr(card, "license_name", None) or getattr(card, "license", None)
    return str(named) if named else None


def _verify(path: Path, stated: Any, progress: Progress) -> None:
    """Compare a file with what the hub states of it: a large one's sha256, of any other the id that git gives it."""
    size = path.stat().st_size
    if stated.lfs is not None:
        digest, expected = hashlib.sha256(), stated.lfs.sha256
    else:
        digest, expected = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), stated.blob_id
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            if stated.lfs is not None:
                progress("verifying", stream.tell(), size)
    if expected is not None and digest.hexdigest() != expected:
        path.resolve().unlink()  # the blob: otherwise the next run would trust it
        path.unlink()
        raise FetchError(f"{path.name} is damaged: its digest is not the one the hub states", "run it again")


class _Mute:
    """A progress bar as huggingface_hub uses one, showing nothing."""

    stop: threading.Event = threading.Event()
    most: int = _SLACK_BYTES  # bytes that may come

    def __init__(self, *_: Any, **options: Any) -> None:
        self.total: int | None = options.get("total")
        self.n: int = options.get("initial") or 0
        self.format_dict: dict[str, Any] = {}

    def __enter__(self) -> "_Mute":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        self.n += int(n or 0)
        if self.n > self.most:
            raise FetchError("the hub sends more than it says that there is")

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    refresh = close = reset = set_description = set_description_str = _ignore
    set_postfix_str = _ignore


class _Stopped(Exception):  # noqa: N818 - it is the answer to a request, not an error
    """Raised inside download threads to end them."""


def _bar_class(progress: Progress, done: int, total: int) -> type[_Mute]:
    """A bar class whose byte bars report to `progress` and, once `stop` is set, end their download.

    One snapshot has up to two byte bars (received, written) that count the same bytes, and one that counts files.
    """

    class Bar(_Mute):
        stop = threading.Event()
        most = total + _SLACK_BYTES
        furthest = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.stop.is_set():
                raise _Stopped
            if self.counts_bytes:
                Bar.furthest = max(Bar.furthest, self.n)
                progress("downloading", min(done + Bar.furthest, total), total)

    return Bar


def _interruptible(work: Callable[[], _Result], bar: type[_Mute]) -> _Result:
    """Run `work` in a thread so that Ctrl-C, which reaches the main thread, ends its download threads soon.

    They notice at the next chunk; one on a connection that brings none is left behind, to notice when it times out.
    """

    def guarded() -> _Result:
        with _no_requests_after(bar.stop):
            return work()

    with run_in_background(guarded) as result:
        try:
            return result()
        except (KeyboardInterrupt, SystemExit):  # the latter from a SIGTERM
            bar.stop.set()
            raise


@contextmanager
def _small_chunks() -> Iterator[None]:
    """While the block lasts, huggingface_hub says how far it is after every 256 KiB.

    Its own 10 MiB are minutes of silence on a slow connection, and as much that is fetched again when it breaks.
    """
    from huggingface_hub import constants

    usual, constants.DOWNLOAD_CHUNK_SIZE = constants.DOWNLOAD_CHUNK_SIZE, _DOWNLOAD_CHUNK
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = usual


@contextmanager
def _no_requests_after(stop: threading.Event) -> Iterator[None]:
    """While the block lasts, every request of huggingface_hub's client is refused once `stop` is set."""
    from huggingface_hub import get_session

    client = get_session()
    hooks = client.event_hooks

    def refuse(_request: object) -> None:
        if stop.is_set():
            raise _Stopped

    client.event_hooks = {**hooks, "request": [*hooks.get("request", []), refuse]}
    try:
        yield
    finally:
        client.event_hooks = hooks


def _unreachable(hub: HubId) -> FetchError:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return FetchError(
            f"cannot fetch {hub}: HF_HUB_OFFLINE is set, and the local cache does not have it whole",
            "unset HF_HUB_OFFLINE, or pass a local directory or .gguf file",
        )
    return FetchError(
        f"cannot fetch {hub}: the hub cannot be reached, and the local cache does not have it whole",
        "check the network (HF_ENDPOINT and proxies apply), or pass a local directory or .gguf file",
    )


def _is_offline(error: Exception) -> bool:
    """No answer at all, as opposed to a refusal. The HTTP library differs between hub releases: go by name."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OfflineModeIsEnabled) or "TransportError" in kinds


def _explain(error: Exception, hub: HubId) -> HeadraceError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{hub.repo} is gated: its owner wants terms accepted first",
            f"accept them at https://huggingface.co/{hub.repo}, then log in (`hf auth login`) or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{hub.repo} has no revision {hub.revision}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model {hub.repo}, or it is private",
            "check the spelling; for a private one log in (`hf auth login`) or set HF_TOKEN",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_offline(error):
        return FetchError(f"the connection to the hub broke while fetching {hub}", _KEPT)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        hint = "the token in use is not accepted: check HF_TOKEN" if status in {401, 403} else "try again later"
        return FetchError(f"the hub answered {status} for {hub}", hint)
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{hub} is not a name the hub allows")
    reason = "".join(character if character.isprintable() else " " for character in str(error))[:200]
    return FetchError(f"fetching {hub} failed: {reason}", _KEPT)
