"""Progress reports of long-running work in models, drawn by app.

A sink is called as `progress(stage, done, total)` from a working or downloading thread, several times a second at
most. `stage` is a short phrase ("downloading", "converting"); a new stage starts a new bar. Counts are bytes unless
the stage names another unit; `total` is None if unknown.
"""

from typing import Protocol

DOWNLOADING = "downloading"  # the stage whose bytes come from the network: a chat shows its speed


class Progress(Protocol):
    """A sink for progress reports. It must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Ignore the report."""
