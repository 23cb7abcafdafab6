"""llama.cpp through its own benchmark, `llama-bench`: one process per measurement, its figures taken as they are.

It reports the seconds of a whole test, so a decode's steps all get the average latency.
"""

import json
import subprocess

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample
from headrace.runtime.errors import EngineError


class LlamaBench:
    """A backend. llama-bench warms up by itself and starts anew each time, so nothing is kept between tests."""

    engine = "llama.cpp"

    def __init__(self, model: str, program: str, gguf: str, threads: int | None) -> None:
        self.model = model
        self._command = [program, "-m", gguf, "-r", "1", "-o", "json", *(["-t", str(threads)] if threads else [])]

    def warm_up(self, test: Test) -> None:
        """Nothing: it does that itself."""

    def measure(self, test: Test) -> Sample:
        lengths = ["-pg", f"{test.prompt},{test.generate}"] if test.kind == "both" else []
        prompt, generate = (0, 0) if lengths else (test.prompt, test.generate)
        command = [*self._command, "-p", str(prompt), "-n", str(generate), *lengths, "-d", str(test.depth)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            entry = json.loads(done.stdout)[0]
            seconds, own = entry["samples_ns"][0] / 1e9, float(entry["avg_ts"])
        except (OSError, subprocess.CalledProcessError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"llama-bench failed on {test.label}: {error!r:.200}") from error
        if test.kind == "prefill":
            return Sample(seconds, 0.0, [], own_tokens_per_second=own)
        if test.kind == "decode":
            return Sample(0.0, None, [seconds / test.generate] * test.generate, own_tokens_per_second=own)
        return Sample(seconds, 0.0, [], own_tokens_per_second=own)

    def close(self) -> None:
        """Nothing is left running."""
