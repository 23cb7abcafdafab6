"""Progress reports of long-running work in models, drawn by app or given to the caller of `app.api.load`.

A sink is called as `progress(stage, done, total)` from a working or downloading thread, for each piece of a file and so
with no limit to the rate. Sinks that draw or send drop reports themselves. `stage` is a short phrase ("downloading",
"converting"); a new stage starts a new bar. Counts are bytes unless the stage names another unit; `total` is None if
unknown.
"""

from typing import Protocol

DOWNLOADING = "downloading"  # the stage whose bytes come from the network: a chat shows its speed


class Progress(Protocol):
    """A sink for progress reports. It must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Ignore the report."""
