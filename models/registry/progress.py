"""How long-running work on the models layer reports progress: one small protocol, drawn by the app.

A progress sink is called as `progress(stage, done, total)` from the thread that does the work (or from a
download thread), several times a second at most. `stage` is a short phrase for people ("downloading",
"converting"); a new stage starts a new bar. Units are whatever the stage counts, bytes unless it says
otherwise; `total` is None when it is not known.
"""

from typing import Protocol


class Progress(Protocol):
    """A sink for progress reports; it must be cheap and must not raise."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """The sink that shows nothing."""
