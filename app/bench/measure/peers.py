"""Other implementations on the same weights (`--vs`), and the processes that run them.

A peer that cannot be opened becomes a note. A new peer is a function in `OPENERS` that returns a `sample.Backend`, a
choice of --vs in `app/cli/bench/options.py`, its K/V formats in `kv_formats.check_formats`, and, if it needs its own
interpreter, a program in `children/`.

Guards: tests/app/bench/measure/test_peers.py and test_kv_formats.py.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.bench.measure.kv_formats import peer_kv_type
from headrace.app.bench.measure.pair import WorkloadPrompt, questions
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Backend, Sample
from headrace.app.bench.measure.setup import EngineSetup
from headrace.models.loading.load import LoadedModel
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.config import environment
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import EngineError

CHILDREN = Path(__file__).parent / "children"
_END_S = 2.0  # for a child to exit by itself


class _FirstLine(Struct):
    """The first line of a child's output, when its model is loaded: a JSON object (`children/`)."""

    ready: object = None  # version of the engine
    threads: int | None = None  # of decode steps
    threads_batch: int | None = None  # of prefill
    settings: dict[str, object] | None = None  # see `EngineSetup`


class Peer(Struct, frozen=True):
    """A peer to compare with.

    engine: its name in `OPENERS`.
    python: its interpreter; None: ours, or llama-bench for llama.cpp.
    gguf: the model file of llama.cpp, which needs one.
    kv: our K/V format, mapped to theirs.
    """

    engine: str
    python: str | None = None
    gguf: str | None = None
    kv: str = "f16"


def open_peers(
    peers: Sequence[Peer],
    loaded: Sequence[LoadedModel],
    tests: Sequence[Test],
    threads: int,
    stack: ExitStack,
    progress: Progress = silent,
) -> tuple[list[Backend], list[str]]:
    """Return the opened backends and a note about every peer. mlx-lm takes every model, the others the first.

    peers: those asked for.
    loaded: headrace's models.
    tests: of the run; a child process allocates memory for the longest.
    threads: told to every peer for prompts and decoding; its `setup` has the numbers that it uses.
    stack: closes the backends, also when opening another is interrupted.
    progress: names the peer that is starting.

    Raises EngineError if no requested peer opens.
    """
    backends: list[Backend] = []
    notes: list[str] = []
    for peer in peers:
        models = loaded if peer.engine == "mlx-lm" else loaded[:1]
        for model in models:
            progress(f"starting {peer.engine}", 0, None)
            try:
                backend, note = OPENERS[peer.engine](peer, model, tests, threads)
            except (EngineError, OSError) as error:
                notes.append(f"{peer.engine} is left out: {error}")
                continue
            stack.callback(backend.close)
            backends.append(backend)
            notes.append(note)
    if peers and not backends:
        raise EngineError(f"nothing to compare with: {'; '.join(notes)}")
    return backends, notes


def _open_mlx_lm(peer: Peer, model: LoadedModel, _: Sequence[Test], threads: int) -> tuple[Backend, str]:
    script = str(CHILDREN / "mlx_lm_child.py")
    command = [peer.python or sys.executable, script, str(model.checkpoint.path)]
    # MLX's only thread setting on a CPU: its linear algebra library's.
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    child = ChildProcess("mlx-lm", model.name, command, variables, threads=threads)
    return child, f"mlx-lm {child.setup.version} reads the same directory as headrace"


def _open_llama_cpp(peer: Peer, model: LoadedModel, tests: Sequence[Test], threads: int) -> tuple[Backend, str]:
    gguf = peer.gguf
    if gguf is None:
        raise EngineError("no GGUF file of the model; give -m FILE.gguf or --llama-model FILE.gguf")
    same = same_weights(gguf, model)
    kind = peer_kv_type(peer.kv)
    if peer.python is not None:
        script = str(CHILDREN / "llama_cpp_child.py")
        max_tokens = str(max(test.tokens for test in tests))
        command = [peer.python, script, gguf, max_tokens, str(threads), kind]
        asked = questions(model, tests)
        child = ChildProcess("llama.cpp", model.name, command, threads=threads, tunes=True, questions=asked)
        note = f"llama.cpp through llama-cpp-python {child.setup.version}, {same}"
        if asked:
            note += ", prompt lookup decoding with 2 or 10 draft tokens, the faster for each workload"
        return child, note
    program = shutil.which("llama-bench")
    if program is None:
        raise EngineError(
            "no llama-bench on the PATH; install it, or name a Python that has llama-cpp-python with --llama-python"
        )
    return LlamaBench(model.name, program, gguf, threads, kind), f"llama.cpp through {program}, {same}"


OPENERS: dict[str, Callable[[Peer, LoadedModel, Sequence[Test], int], tuple[Backend, str]]] = {
    "mlx-lm": _open_mlx_lm,
    "llama.cpp": _open_llama_cpp,
}
"""Functions that start a peer for a model, tests and a number of threads; they return it with a note."""


def same_weights(gguf: str, model: LoadedModel) -> str:
    """Return in words whether headrace's model was converted from this very GGUF file."""
    known = (model.checkpoint.origin or {}).get("sha256")
    with Path(gguf).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = Path(gguf).name
    if known == digest:
        return f"the same weights ({name}, sha256 {digest[:12]})"
    return f"possibly other weights ({name}, sha256 {digest[:12]})"


class ChildProcess:
    """A peer in a child process for the whole benchmark, driven by JSON lines (protocol: `children/__init__.py`).

    Raises EngineError when it fails or ends.

    engine, model: names, for results.
    command: starts it.
    variables: of its environment, besides ours.
    threads: that it was told to use.
    tunes: it gets a whole test once, so that it finds its fastest settings.
    questions: workloads by name.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        threads: int | None = None,
        tunes: bool = False,
        questions: Mapping[str, WorkloadPrompt] | None = None,
    ) -> None:
        self._questions = questions or {}
        self._tunes = tunes
        self.engine = engine
        self.model = model
        # Its own session: Ctrl-C reaches only the parent, which closes the child when its results are in.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if environment.debug() else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(variables or {})},
            start_new_session=sys.platform != "win32",
        )
        try:
            ready = typed(_FirstLine, self._read())
            self.setup = EngineSetup(
                engine=engine,
                model=model,
                version=str(ready.ready),
                threads=ready.threads,
                threads_batch=ready.threads_batch,
                threads_told=threads,
                settings=ready.settings or {},
            )
        except BaseException:  # Ctrl-C, too: the child would go on
            self.close()
            raise

    def warm_up(self, test: Test) -> None:
        if self._tunes:
            self._ask(test, tune=True)
            return
        self.measure(test.short)

    def measure(self, test: Test) -> Sample:
        return self._ask(test)

    def _ask(self, test: Test, **more: bool) -> Sample:
        request: dict[str, object] = {"generate": test.generate, **more}
        if test.kind == "workload":
            question = self._questions[test.workload]
            request |= {"tokens": list(question.prompt), "stop": sorted(question.stop_ids)}
            request["temperature"] = test.temperature
        else:
            request |= {"prompt": test.prompt, "depth": test.depth}
        if test.batch > 1:
            request["batch"] = test.batch
        reply = self.ask(request)
        if isinstance(chosen := reply.pop("chosen", None), dict):
            named = {f"{test.label} with": " ".join(map(str, chosen.values()))}
            self.setup = replace(self.setup, settings={**self.setup.settings, **named})
        try:
            return typed(Sample, reply)
        except ValueError as error:
            raise EngineError(f"{self.engine} failed: {error}") from None

    def ask(self, request: Mapping[str, object]) -> dict[str, object]:
        """Send a request and return the reply."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self._read()

    def close(self) -> None:
        """Close the pipes, and kill the process if it does not exit."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply = json.loads(line)
        if not isinstance(reply, dict) or "error" in reply:
            reason = reply["error"] if isinstance(reply, dict) else reply
            raise EngineError(f"{self.engine} failed: {reason}")
        return reply

    def _ended(self) -> EngineError:
        code = self._process.wait()
        return EngineError(f"{self.engine}'s process ended (exit code {code})", "HEADRACE_DEBUG=1 shows its output")


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
