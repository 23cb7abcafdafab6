"""Control of huggingface_hub's downloads: progress, size limit and interruption."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub import constants, get_session

from headrace.models.registry.progress import Progress
from headrace.runtime.errors import FetchError
from headrace.runtime.machine.background import run_in_background

_DOWNLOAD_CHUNK = 256 << 10
_SLACK_BYTES = 32 << 20  # allowed beyond the size that the hub states
_Result = TypeVar("_Result")


class Mute:
    """A progress bar with tqdm's interface that shows nothing and limits the bytes."""

    stop: threading.Event = threading.Event()
    max_bytes: int = _SLACK_BYTES

    def __init__(self, *_: Any, **options: Any) -> None:
        self.total: int | None = options.get("total")
        self.n: int = options.get("initial") or 0
        self.format_dict: dict[str, Any] = {}

    def __enter__(self) -> "Mute":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        self.n += int(n or 0)
        if self.n > self.max_bytes:
            raise FetchError("the hub sends more bytes than it states")

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

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


def interruptible(work: Callable[[], _Result], bar: type[Mute]) -> _Result:
    """Run `work` in a thread and end its download threads on Ctrl-C, which reaches the main thread.

    They end at the next chunk; a stalled connection ends when it times out.
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
