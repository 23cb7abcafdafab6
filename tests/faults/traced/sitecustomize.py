"""Python runs this first where its folder is on PYTHONPATH: an engine's process then writes down what it generates.

One file for each answer, one line of JSON for each piece of text, before the engine itself does anything with it: a
trace that knows nothing of the store. Read by `tests.faults.trace`.
"""

import sys

if any(argument.endswith("app/engine/start.py") for argument in sys.orig_argv):
    import itertools
    import json
    import os
    import time
    from pathlib import Path
    from typing import Any

    import headrace.models.text.answer as module
    from headrace.models.text.events import Completed, TextChunk

    numbers = itertools.count()
    folder = Path(os.environ["HEADRACE_HOME"]) / "trace"
    folder.mkdir(parents=True, exist_ok=True)

    class TracedText(module.AnswerText):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            name = f"{time.monotonic_ns():020}-{os.getpid()}-{next(numbers)}"
            self._file = (folder / name).open("wb", buffering=0)

        def step(self, step: Any) -> TextChunk:
            return self._traced(super().step(step))

        def end(self, finished: Any) -> Completed:
            return self._traced(super().end(finished))

        def _traced(self, part: Any) -> Any:
            if part.text:
                self._file.write(json.dumps(part.text).encode() + b"\n")
            return part

    module.AnswerText = TracedText
