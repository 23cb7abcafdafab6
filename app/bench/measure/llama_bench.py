"""llama.cpp's own benchmark program as a benchmark backend.

Guard: tests/app/bench/measure/test_kv_formats.py.
"""

import json
import subprocess

from msgspec import Struct

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample
from headrace.app.bench.measure.setup import EngineSetup
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import EngineError


class _LlamaBenchTest(Struct):
    """llama-bench's report of one test; None where a version does not report a figure."""

    samples_ns: list[float] = []
    avg_ts: float | None = None
    n_threads: int | None = None
    build_number: int | None = None
    build_commit: str | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    type_k: str | None = None
    n_gpu_layers: int | None = None


class LlamaBench:
    """llama.cpp's own benchmark as a backend: a process for each measurement, which warms up by itself.

    It reports the seconds of a whole test, so each step of a decode gets the average latency. A short run first reads
    the settings it really uses. Raises EngineError if that fails.
    """

    engine = "llama.cpp"

    def __init__(self, model: str, program: str, gguf: str, threads: int, kv: str = "f16") -> None:
        self.model = model
        self._command = [program, "-m", gguf, "-t", str(threads), "-r", "1", "-o", "json"]
        self._flash_values = ["1", "0"]  # of -fa: with flash attention, and without
        if kv != "f16":
            self._command += ["-ctk", kv, "-ctv", kv]
            self._flash_values = ["1"]  # quantized values need flash attention
        self._fastest_flash: dict[Test, str] = {}  # the faster value for each test
        report = self._run(Test(1, 0), "1")
        used = report.n_threads
        self.setup = EngineSetup(
            engine=self.engine,
            model=model,
            version=str(report.build_number or report.build_commit or "") or None,
            threads=used,
            threads_batch=used,  # one number for both
            threads_told=threads,
            settings={
                "flash_attention": "on or off, the faster for each test" if len(self._flash_values) > 1 else "on",
                "batch": report.n_batch,
                "ubatch": report.n_ubatch,
                "kv_type": report.type_k,
                "gpu_layers": report.n_gpu_layers,
            },
        )

    def warm_up(self, test: Test) -> None:
        """Choose flash attention on or off, the faster for this test."""
        seconds = {flash: _seconds(self._run(test, flash), test) for flash in self._flash_values}
        self._fastest_flash[test] = min(seconds, key=lambda flash: seconds[flash])

    def measure(self, test: Test) -> Sample:
        entry = self._run(test, self._fastest_flash.get(test, "1"))
        seconds = _seconds(entry, test)
        own_speed = entry.avg_ts
        if test.kind == "decode":
            return Sample(0.0, None, [seconds / test.generate] * test.generate, own_tokens_per_second=own_speed)
        return Sample(seconds, 0.0, [], own_tokens_per_second=own_speed)

    def close(self) -> None:
        """Do nothing: no process is kept."""

    def _run(self, test: Test, flash: str) -> _LlamaBenchTest:
        """Run llama-bench and return the report of one test."""
        if test.kind == "both":
            lengths = ["-p", "0", "-n", "0", "-pg", f"{test.prompt},{test.generate}"]
        else:
            lengths = ["-p", str(test.prompt), "-n", str(test.generate)]
        command = [*self._command, *lengths, "-fa", flash, "-d", str(test.depth)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return typed(_LlamaBenchTest, json.loads(done.stdout)[0])
        except (OSError, subprocess.CalledProcessError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"llama-bench failed on {test.label}: {error!r:.200}") from error


def _seconds(report: _LlamaBenchTest, test: Test) -> float:
    if not report.samples_ns:
        raise EngineError(f"llama-bench gave no figures for {test.label}")
    return report.samples_ns[0] / 1e9
