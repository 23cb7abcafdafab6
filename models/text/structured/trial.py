"""Compilation of a grammar on trial, in a process that can be ended.

llguidance compiles some grammars for minutes and in gigabytes, and nothing ends it within a process. So a new grammar
is compiled there first: with the model's control tokens and single bytes as the vocabulary, which takes milliseconds.
The process limits its own processor time and memory; the system ends it beyond them, and the next trial starts another.

`Trial` is this program's side, and `main` the process (see `worker`). `grammars` has a `Trial` for each vocabulary.

Guards: tests/models/text/structured/test_trial.py and test_grammars.py.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from weakref import WeakSet

from headrace.models.text.worker import StartError, Worker, jobs, send_answer

SECONDS = 2  # of processor time for one grammar
MEMORY = 2 << 30  # bytes of the process
_ANSWER_BYTES = 0  # an answer says that the job is done, and no more
_WALL = 15  # seconds of the clock for each of SECONDS: other programs may keep the machine busy


class TrialError(Exception):
    """A grammar took too much time or memory."""


class Trial:
    """The process for one vocabulary, started with the first grammar. Where none can run, every grammar passes."""

    def __init__(self, size: int, controls: Mapping[int, bytes], ends: list[int]) -> None:
        """Describe the vocabulary to the process.

        size: number of tokens.
        controls: bytes of control tokens by id.
        ends: ids of the tokens that end a turn.
        """
        named = {index: text.decode("latin-1") for index, text in controls.items()}
        self._vocabulary = json.dumps({"size": size, "controls": list(named.items()), "ends": ends}).encode()
        self._worker: Worker | None = None
        self._has_vocabulary = False  # True once the process has it
        self._can_run = True
        self._lock = Lock()
        _trials.add(self)

    def start(self) -> None:
        """Start the process, without waiting for it."""
        with self._lock:
            self._start()

    def check(self, grammar: str, limits: Mapping[str, object]) -> None:
        """Compile a grammar (llguidance's JSON) within llguidance's limits. Raises TrialError."""
        with self._lock:
            self._start()  # in the lock: the grammar of another thread may end the process
            if self._worker is None:
                return
            try:
                if not self._has_vocabulary:
                    self._worker.wait_until_ready()
                    try:
                        self._worker.answer(self._vocabulary, _ANSWER_BYTES)
                    except (OSError, EOFError) as error:  # no fault of the grammar
                        raise StartError from error
                    self._has_vocabulary = True
                self._worker.answer(json.dumps([grammar, limits]).encode(), _ANSWER_BYTES)
            except StartError:
                self._end()
                self._can_run = False
            except (OSError, EOFError):
                self._end()
                raise TrialError from None
            except BaseException:  # Ctrl-C: the next grammar must not get the answer to this one
                self._end()
                raise

    def reset_after_fork(self) -> None:
        """Begin anew in a fork of the program: another thread may have had the lock."""
        self._lock = Lock()
        self._worker = None  # does not kill the parent's process: `worker._leave_all` ran before
        self._has_vocabulary = False

    def _start(self) -> None:
        """Start the process, if none runs. This thread has the lock."""
        if self._worker is not None and self._worker.has_ended:
            self._end()
        if self._worker is None and self._can_run:
            with suppress(OSError):  # no memory, no interpreter
                self._worker = Worker(__name__)

    def _end(self) -> None:
        """End the process, if there is one. This thread has the lock."""
        worker = self._worker
        self._worker = None
        self._has_vocabulary = False
        if worker is not None:
            worker.end()


_trials: "WeakSet[Trial]" = WeakSet()


def _reset_all_after_fork() -> None:
    """Begin all trials anew in a fork of the program."""
    for trial in list(_trials):
        trial.reset_after_fork()


os.register_at_fork(after_in_child=_reset_all_after_fork)


def main() -> None:
    """Compile grammars for the vocabulary that is the first job. All answers are empty."""
    import resource
    import signal

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # The vocabulary: control tokens under their ids, single bytes under free ones, and no other tokens.
    received = jobs()
    vocabulary = json.loads(next(received))
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
    send_answer(b"")
    for job in received:
        grammar, limits = json.loads(job)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        # The limit counts from the process's start, in whole seconds.
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS + 1, hard))
        signal.alarm(_WALL * SECONDS)
        with suppress(BaseException):  # which the program meets, too
            matcher = LLMatcher(built, grammar, log_level=0, limits=LLParserLimits(**limits))
            matcher.compute_bitmask()
        signal.alarm(0)
        send_answer(b"")
