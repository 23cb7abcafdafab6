"""huggingface_hub's client under control: checked responses, bounded sizes, progress, interruption.

    with checked_responses(), small_chunks():
        interruptible(lambda: snapshot_download(..., tqdm_class=bar), bar)

huggingface_hub uses file names from headers and JSON unchecked. Inside `checked_responses`, digests, commits and tags
that are not plain names are refused, so that nothing is written outside the cache. Encoded bodies and API responses
over MAX_API_BYTES are refused too. The progress bars bound the sizes of files, and end a download on Ctrl-C.
docs/workarounds.md has the upstream issues.

Guards: tests/models/registry/test_malicious_hub.py and test_fetch_hub.py.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from huggingface_hub import constants, get_session

from headrace.models.registry.hub_id import COMMIT
from headrace.models.registry.progress import DOWNLOADING, Progress
from headrace.runtime.errors import FetchError
from headrace.runtime.machine.background import run_in_background

MAX_API_BYTES = 64 << 20  # of a response of the hub's API
_DOWNLOAD_CHUNK = 256 << 10  # bytes between two reports of progress
_SLACK_BYTES = 32 << 20  # allowed beyond the size that the hub states
_NAME = re.compile(r"[A-Za-z0-9_+=:-][A-Za-z0-9._+=:-]{0,199}")  # a digest, say; no slash, and no dot at the beginning
# Values of these become names of files and folders in the cache.
_NAMES_IN_HEADERS = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")
_NAMES_IN_JSON = ("sha", "oid", "sha256", "blobId", "xetHash", "treeOid")
_Result = TypeVar("_Result")


@contextmanager
def checked_responses() -> Iterator[None]:
    """Check every response of huggingface_hub's client during the block; refused ones raise FetchError."""
    client = get_session()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks.get("request", []), _refuse_encodings],
        "response": [*hooks.get("response", []), _check],
    }
    try:
        yield
    finally:
        client.event_hooks = hooks


def check_commit(commit: object) -> str:
    """Return `commit` if it is a full commit hash; otherwise raise FetchError."""
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise FetchError(f"the hub's commit is not a hash: {commit!a:.60}")
    return commit


def _refuse_encodings(request: Any) -> None:
    """Ask for a body without compression, so that its size is that of what it contains."""
    request.headers["accept-encoding"] = "identity"


def _check(response: Any) -> None:
    """Check a response before the client reads it. The body of one of the API is read here, within the limit.

    Bodies of files are left to the client: their bars limit the bytes, see `Mute`.
    """
    for name in _NAMES_IN_HEADERS:
        if (value := response.headers.get(name)) is not None:
            # An etag is quoted, after W/ if it is a weak one.
            _check_name(value.removeprefix("W/").strip('"'))
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("the hub's response has a content encoding, though none was requested")
    if "/api/" in response.url.path and response.request.method == "GET":
        response.stream = _bounded(response.stream)
        response.read()
        with suppress(ValueError, RecursionError):  # the client does not use invalid JSON either
            _check_names(json.loads(response.content))


def _check_name(value: object) -> None:
    """Raise FetchError for a value that is not a plain name: no slash, and no dot at its beginning. None is allowed."""
    if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise FetchError(f"the hub's response has a name that is not allowed: {value!a:.60}")


def _check_names(document: object) -> None:
    """Check the values of _NAMES_IN_JSON at any depth, without recursion."""
    waiting = [document]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            for key in _NAMES_IN_JSON:
                _check_name(part.get(key))
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _bounded(stream: Any) -> Any:
    """Return the stream wrapped so that it raises FetchError beyond MAX_API_BYTES."""
    # The client requires its own stream class, and the HTTP library differs between hub releases.
    base: Any = next((kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream"), object)

    class Bounded(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for part in stream:
                if (size := size + len(part)) > MAX_API_BYTES:
                    raise FetchError(f"the hub's response is longer than {MAX_API_BYTES >> 20} MiB")
                yield part

        def close(self) -> None:
            stream.close()

    return Bounded()


class Mute:
    """A progress bar with tqdm's interface that shows nothing and limits the bytes.

    Used as it is, it suits small files: _SLACK_BYTES at most, whatever their size, and `stop` is never set.
    `bar_class` returns a subclass for a download.
    """

    stop: threading.Event = threading.Event()
    max_bytes: int = _SLACK_BYTES

    def __init__(self, *_: object, **options: Any) -> None:
        self.total: int | None = options.get("total")
        self.n: int = options.get("initial") or 0
        self.format_dict: dict[str, object] = {}

    def __enter__(self) -> "Mute":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        self.n += int(n or 0)
        if self.n > self.max_bytes:
            raise FetchError("the hub sends more bytes than it states")

    def _ignore(self, *_: object, **__: object) -> None:
        """Do nothing, as other methods of tqdm that huggingface_hub calls."""

    refresh = close = reset = set_description = set_description_str = _ignore
    set_postfix_str = _ignore


class _Stopped(Exception):  # noqa: N818 - a requested stop, not an error
    """Raised inside download threads to end them."""


def bar_class(progress: Progress, done: int, total: int) -> type[Mute]:
    """Return a class of bars that report bytes to `progress` and end their download once `stop` is set.

    A snapshot has up to two byte bars (received, written), which count the same bytes, and one that counts files.
    """

    class Bar(Mute):
        stop = threading.Event()
        max_bytes = total + _SLACK_BYTES
        furthest = 0  # bytes of the bar that is ahead, in all bars of this class

        def __init__(self, *args: object, **options: Any) -> None:
            super().__init__(*args, **options)
            self.counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.stop.is_set():
                raise _Stopped
            if self.counts_bytes:
                Bar.furthest = max(Bar.furthest, self.n)
                progress(DOWNLOADING, min(done + Bar.furthest, total), total)

    return Bar


def interruptible(work: Callable[[], _Result], bar: type[Mute]) -> _Result:
    """Run `work` in a thread and end its download threads on Ctrl-C, which reaches the main thread.

    They end at the next chunk or request; a stalled connection ends when it times out.
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
def small_chunks() -> Iterator[None]:
    """Let huggingface_hub report progress every 256 KiB during the block.

    Its default of 10 MiB takes minutes on a slow connection, and a broken chunk is fetched again.
    """
    usual = constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = _DOWNLOAD_CHUNK
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = usual


@contextmanager
def _no_requests_after(stop: threading.Event) -> Iterator[None]:
    """Refuse requests of huggingface_hub's client during the block once `stop` is set."""
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
