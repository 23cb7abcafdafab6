"""A peer in a child process, as a benchmark backend; the programs are in `children/`.

Guard: tests/app/bench/measure/test_peers.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.bench.measure.pair import WorkloadPrompt
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample
from headrace.app.bench.measure.setup import EngineSetup
from headrace.runtime.config import environment
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import EngineError

_END_S = 2.0  # for a child to exit by itself


class _FirstLine(Struct):
    """The first line of a child's output, when its model is loaded: a JSON object (`children/`)."""

    ready: object = None  # version of the engine
    threads: int | None = None  # of decode steps
    threads_batch: int | None = None  # of prefill
    settings: dict[str, object] | None = None  # see `EngineSetup`


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
