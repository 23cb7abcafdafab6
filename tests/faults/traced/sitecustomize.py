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
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    import headrace.models.text.answer as module

    untraced = module.answer
    numbers = itertools.count()
    folder = Path(os.environ["HEADRACE_HOME"]) / "trace"
    folder.mkdir(parents=True, exist_ok=True)

    def answer(*args: Any) -> Iterator[module.Part]:
        with (folder / f"{time.monotonic_ns():020}-{os.getpid()}-{next(numbers)}").open("wb", buffering=0) as file:
            for part in untraced(*args):
                if isinstance(part, module.TextChunk | module.Completed) and part.text:
                    file.write(json.dumps(part.text).encode() + b"\n")
                yield part

    module.answer = answer
