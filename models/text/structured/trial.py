"""Compilation of a grammar on trial, in a process that can be ended.

llguidance compiles some grammars for minutes and in gigabytes, and nothing ends it within a process. So a new grammar
is compiled there first: with the model's control tokens and single bytes as the vocabulary, which takes milliseconds.
The process limits its own processor time and memory; the system ends it beyond them, and the next trial starts another.

This file is that process's program as well: it imports llguidance alone. `grammars` has a `Trial` for each vocabulary.

Guards: tests/models/text/structured/test_grammars.py.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO
from weakref import finalize

SECONDS = 2  # of processor time for one grammar
MEMORY = 2 << 30  # bytes of the process
_READY = "ready\n"
_WALL = 15  # seconds of the clock for each of SECONDS: other programs may keep the machine busy


class TrialError(Exception):
    """A grammar took too much time or memory."""


class Trial:
    """The process for one vocabulary, started with the first grammar. Where none can run, every grammar passes."""

    def __init__(self, size: int, controls: Mapping[int, bytes], ends: list[int]) -> None:
        """size: of the vocabulary. controls: bytes of its control tokens by id. ends: those that end a turn."""
        named = {index: text.decode("latin-1") for index, text in controls.items()}
        self._vocabulary = json.dumps({"size": size, "controls": list(named.items()), "ends": ends})
        self._pipes: _Pipes | None = None
        self._can_run = bool(sys.executable)
        self._lock = Lock()

    def start(self) -> None:
        """Start the process, without waiting for it."""
        with self._lock, suppress(OSError):  # no memory
            if self._pipes is None and self._can_run:
                self._pipes = _start_process()
                self._pipes.requests.write(f"{self._vocabulary}\n")
                self._pipes.requests.flush()

    def check(self, grammar: str, limits: Mapping[str, object]) -> None:
        """Compile a grammar (llguidance's JSON, one line) within llguidance's limits. Raises TrialError."""
        self.start()
        with self._lock:
            pipes = self._pipes
            if pipes is None:
                return
            if not pipes.are_ready and not self._await_ready(pipes):
                return
            try:
                pipes.requests.write(json.dumps([grammar, limits]) + "\n")
                pipes.requests.flush()
                answer = pipes.answers.readline()
            except OSError:
                answer = ""
            if not answer:
                self._pipes = None
                raise TrialError

    def _await_ready(self, pipes: "_Pipes") -> bool:
        """Wait for a process that was started; return False for one that ended before its first grammar."""
        pipes.are_ready = pipes.answers.readline() == _READY
        if not pipes.are_ready:
            self._pipes = None
            self._can_run = False
        return pipes.are_ready


class _Pipes:
    """The ends of a process, which goes with them."""

    def __init__(self, requests: IO[str], answers: IO[str], process: "subprocess.Popen[str]") -> None:
        self.requests = requests
        self.answers = answers
        self.are_ready = False
        finalize(self, _end, process)


def _start_process() -> _Pipes:
    """Start this file as a program, with the folder of llguidance as its argument."""
    import llguidance  # late, as everywhere

    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(Path(llguidance.__file__).parent.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the program alone
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return _Pipes(process.stdin, process.stdout, process)


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process, and close its pipes."""
    process.kill()
    with suppress(OSError):  # of a pipe to a process that has ended
        process.communicate()


def main(library: str) -> None:
    """Compile grammars from standard input, and answer each with a line."""
    sys.path.insert(0, library)
    import resource
    import signal

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # The vocabulary: control tokens under their ids, single bytes under free ones, and no other tokens.
    vocabulary = json.loads(sys.stdin.readline())
    tokens = [b""] * vocabulary["size"]
    for index, text in vocabulary["controls"]:
        tokens[index] = text.encode("latin-1")
    free = (index for index, token in enumerate(tokens) if not token)
    # With fewer than 256 free ids, the last bytes have none.
    ids = {bytes([value]): index for value, index in zip(range(256), free, strict=False)}
    for byte, index in ids.items():
        tokens[index] = byte

    class Bytes:
        """The vocabulary as llguidance reads it, see `TokenTrie`."""

        is_tokenizer_wrapper = True
        bos_token_id = None
        eos_token_id = vocabulary["ends"][0]

        def __init__(self) -> None:
            self.tokens = tokens
            self.special_token_ids = [index for index, _ in vocabulary["controls"]]

        def __call__(self, text: str) -> list[int]:
            return [ids[bytes([byte])] for byte in text.encode() if bytes([byte]) in ids]

    built = LLTokenizer(Bytes(), eos_token=vocabulary["ends"])  # type: ignore[arg-type]
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _say(_READY)
    for line in sys.stdin:
        grammar, limits = json.loads(line)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        # The limit counts from the process's start, in whole seconds.
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS + 1, hard))
        signal.alarm(_WALL * SECONDS)
        with suppress(BaseException):  # which the program meets, too
            matcher = LLMatcher(built, grammar, log_level=0, limits=LLParserLimits(**limits))
            matcher.compute_bitmask()
        signal.alarm(0)
        _say("done\n")


def _say(line: str) -> None:
    """Answer with a line at once."""
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
