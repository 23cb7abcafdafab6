"""An answer on standard output as it grows, sanitised for a terminal; prefill progress on standard error.

Of an answer with a schema or a grammar, thinking is left out: standard output has the text that fits.
"""

import sys
import time
from collections.abc import Iterable

from headrace.app.answer.answer import Answer
from headrace.app.answer.repetition import REPEATS
from headrace.app.cli.say import say
from headrace.app.output.redrawn_line import RedrawnLine
from headrace.app.output.sanitise import Sanitiser
from headrace.models.text.answer import Part
from headrace.runtime.engine.request import PrefillProgress

_PATIENCE_S = 1.0  # of prefill before its progress is shown


def print_answer(answer: Answer, parts: Iterable[Part], *, echo: bool, quiet: bool) -> None:
    """Consume an answer to its end. echo: print its text. quiet: show no progress."""
    progress, sanitiser, last, printed = RedrawnLine(quiet=quiet), Sanitiser(), "\n", 0
    tells = sys.stderr.isatty() and not quiet
    for part in parts:
        if isinstance(part, PrefillProgress):
            if time.perf_counter() - answer.prompt.started > _PATIENCE_S:
                progress.draw(f"prefill {part.done} of {part.total} tokens")
            continue
        progress.clear()
        text = part.text
        if answer.constrained:
            whole = answer.growing_result
            text, printed = whole[printed:], len(whole)
        if text and echo:
            last = text
            sys.stdout.write(sanitiser.feed(last))
            sys.stdout.flush()
        if tells and answer.repeats:
            tells = False
            apart = "" if last.endswith("\n") or not sys.stdout.isatty() else "\n"
            say(f"{apart}headrace: {REPEATS}; Ctrl-C ends it", err=True)
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
