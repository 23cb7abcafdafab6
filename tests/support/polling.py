"""Polling of parallel answers."""

from collections.abc import Callable

from headrace.app.chat.parallel_answers import ParallelAnswers


def until(it: ParallelAnswers, true: Callable[[], object]) -> None:
    for _ in range(300):
        if true():
            return
        it.poll()
    raise AssertionError([(side.phase, side.notice) for side in it.answers])
