"""A peer in a child process, driven by JSON lines (protocol: `app.bench.measure.children`)."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from headrace.app.bench.measure.pair import Question
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.sample import Sample
from headrace.app.bench.measure.setup import Setup
from headrace.runtime.config import environment
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import EngineError

WARM_UP_TOKENS = 16


class ChildProcess:
    """A peer's process, running for the whole benchmark. Raises EngineError when it fails or ends."""

    def __init__(
        self,
        engine: str,
        model: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        threads: int | None = None,
        tunes: bool = False,
        questions: Mapping[str, Question] | None = None,
        scratch: TemporaryDirectory[str] | None = None,
    ) -> None:
        self._scratch = scratch  # the child's folder, removed behind it
        self._questions = questions or {}  # workloads by name
        self._tunes = tunes  # sends the whole test once, so that the child finds its fastest settings
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
            ready = self._read()
            self.setup = Setup(
                engine=engine,
                model=model,
                version=str(ready.get("ready")),
                threads=ready.get("threads"),
                threads_batch=ready.get("threads_batch"),
                threads_told=threads,
                settings=ready.get("settings") or {},
            )
        except BaseException:
            self.close()
            raise

    def warm_up(self, test: Test) -> None:
        if self._tunes:
            self._ask(test, tune=True)
            return
        prompt = min(test.prompt, WARM_UP_TOKENS)
        generate = min(test.generate, WARM_UP_TOKENS)
        self.measure(replace(test, prompt=prompt, generate=generate))

    def measure(self, test: Test) -> Sample:
        return self._ask(test)

    def _ask(self, test: Test, **more: bool) -> Sample:
        request: dict[str, Any] = {"generate": test.generate, **more}
        if test.kind == "workload":
            question = self._questions[test.workload]
            request |= {"tokens": list(question.prompt), "stop": sorted(question.stop_ids)}
            request["temperature"] = test.temperature
        else:
            request |= {"prompt": test.prompt, "depth": test.depth}
        if test.batch > 1:
            request["batch"] = test.batch
        reply = self.ask(request)
        if (chosen := reply.pop("chosen", None)) is not None:
            named = {f"{test.label} with": " ".join(map(str, chosen.values()))}
            self.setup = replace(self.setup, settings={**self.setup.settings, **named})
        try:
            return typed(Sample, reply)
        except ValueError as error:
            raise EngineError(f"{self.engine} failed: {error}") from None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
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
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _read(self) -> dict[str, Any]:
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
