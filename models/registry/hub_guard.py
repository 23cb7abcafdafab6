"""Checks on hub responses, as huggingface_hub uses file names from headers and JSON unchecked.

    with checked_responses():
        snapshot_download(...)

Inside the block, digests, commits and tags that are not plain names are refused, so that nothing is written outside
the cache. Encoded bodies and API responses over MAX_API_BYTES are refused too. File sizes are bounded by the progress
bars of the download.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from headrace.runtime.errors import FetchError

MAX_API_BYTES = 64 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_+=:-][A-Za-z0-9._+=:-]{0,199}")
_NAMES_IN_HEADERS = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")
_NAMES_IN_JSON = ("sha", "oid", "sha256", "blobId", "xetHash", "treeOid")


@contextmanager
def checked_responses() -> Iterator[None]:
    """Check every response of huggingface_hub's client during the block; refused ones raise FetchError."""
    from huggingface_hub import get_session

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
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise FetchError(f"the hub's commit is not a hash: {commit!a:.60}")
    return commit


def _refuse_encodings(request: Any) -> None:
    request.headers["accept-encoding"] = "identity"


def _check(response: Any) -> None:
    for name in _NAMES_IN_HEADERS:
        if (value := response.headers.get(name)) is not None:
            _check_name(value.removeprefix("W/").strip('"'))
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("the hub's response has a content encoding, though none was requested")
    if "/api/" in response.url.path and response.request.method == "GET":
        response.stream = _bounded(response.stream)
        response.read()
        with suppress(ValueError, RecursionError):  # the client does not use invalid JSON either
            _check_names(json.loads(response.content))


def _check_name(value: object) -> None:
    if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise FetchError(f"the hub's response has a name that is not allowed: {value!a:.60}")


def _check_names(document: Any) -> None:
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
