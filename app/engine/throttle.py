"""Rate limit of progress reports."""

import time

from headrace.models.registry.progress import Progress

_INTERVAL_S = 0.1


def throttled(sink: Progress) -> Progress:
    """Return a sink that passes one report per 0.1 s and stage, and each stage's first and last."""
    passed: dict[str, float] = {}

    def report(stage: str, done: int, total: int | None, /) -> None:
        now = time.monotonic()
        if done != total and now - passed.get(stage, float("-inf")) < _INTERVAL_S:
            return
        passed[stage] = now
        sink(stage, done, total)

    return report
