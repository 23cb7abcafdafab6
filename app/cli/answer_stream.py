"""An answer on standard output as it grows, sanitised for a terminal; prefill progress on standard error."""

import sys
import time
from collections.abc import Iterable

from headrace.app.answer.answer import Answer
from headrace.app.output.redrawn_line import RedrawnLine
from headrace.app.output.sanitise import Sanitiser
from headrace.models.text.answer import Part
from headrace.runtime.engine.request import PrefillProgress

_PATIENCE_S = 1.0  # of prefill before its progress is shown


def print_answer(answer: Answer, parts: Iterable[Part], *, echo: bool, quiet: bool) -> None:
    """Consume an answer to its end. echo: print its text. quiet: show no progress."""
    progress, sanitiser, last = RedrawnLine(quiet=quiet), Sanitiser(), "\n"
    for part in parts:
        if isinstance(part, PrefillProgress):
            if time.perf_counter() - answer.prompt.started > _PATIENCE_S:
                progress.draw(f"prefill {part.done} of {part.total} tokens")
            continue
        progress.clear()
        if part.text and echo:
            last = part.text
            sys.stdout.write(sanitiser.feed(last))
            sys.stdout.flush()
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
