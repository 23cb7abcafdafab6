"""What a hub may answer, whoever it is: huggingface_hub takes names of files from headers and JSON as they come.

    with only_sound_answers():
        snapshot_download(...)

While the block lasts, every response of huggingface_hub's client is looked at before anything is made of it. Digests,
commits and tags that are no plain names are refused, so that nothing is written outside of the cache; so are bodies
that are encoded, and answers of the API beyond MAX_API_BYTES, which would be read into memory whole. Files are bounded
by whoever counts their bytes.
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
def only_sound_answers() -> Iterator[None]:
    """See above. Calls inside raise FetchError for what is refused."""
    from huggingface_hub import get_session

    client = get_session()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks.get("request", []), _ask_plainly],
        "response": [*hooks.get("response", []), _check],
    }
    try:
        yield
    finally:
        client.event_hooks = hooks


def check_commit(commit: object) -> str:
    """The commit, if it is one. Raises FetchError."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise FetchError(f"the hub states no commit but {commit!a:.60}")
    return commit


def _ask_plainly(request: Any) -> None:
    request.headers["accept-encoding"] = "identity"


def _check(response: Any) -> None:
    for name in _NAMES_IN_HEADERS:
        if (value := response.headers.get(name)) is not None:
            _check_name(value.removeprefix("W/").strip('"'))
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("the hub answered in an encoding that nobody asked for")
    if "/api/" in response.url.path and response.request.method == "GET":
        response.stream = _bounded(response.stream)
        response.read()
        with suppress(ValueError, RecursionError):  # nothing is made of what is no JSON
            _check_names(json.loads(response.content))


def _check_name(value: object) -> None:
    if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise FetchError(f"the hub gave something the name {value!a:.60}, which is none")


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
    """The same stream, which ends in a FetchError beyond MAX_API_BYTES."""
    # The client takes its own kind only, and which HTTP library that is of differs between hub releases.
    base: Any = next((kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream"), object)

    class Bounded(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for part in stream:
                if (size := size + len(part)) > MAX_API_BYTES:
                    raise FetchError(f"the hub's answer is longer than {MAX_API_BYTES >> 20} MiB")
                yield part

        def close(self) -> None:
            stream.close()

    return Bounded()
