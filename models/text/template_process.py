"""Compilation and rendering of chat templates in a process of their own, with limits on time and memory.

`template_worker` is its program (see `worker`), and the kernel enforces the limits there. One process serves all
templates and all threads of a program, one job at a time: a render takes a millisecond, and a program takes no more
than one may take. The process starts with the first job, and anew after a job that ended it. Ctrl-C, and `stop` of
`encoding_ends`, end the wait for an answer together with the process.

CheckpointError means that the template fails, which callers may remember. A plain HeadraceError is no fault of the
template: the process cannot start, or something else kills it, as Linux does when memory is short.

Importing this module imports no jinja2.

Guard: tests/models/text/test_template_process.py.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

from msgspec import Struct

from headrace.models.text.encoding import MAX_TEXT, EncodingStoppedError, is_stopped
from headrace.models.text.template_text import OUTSIDE, OWN, TemplateText
from headrace.models.text.template_worker import LANDLOCK_FAILED, OUT_OF_MEMORY, Job
from headrace.models.text.worker import LOOK_S, LongAnswerError, StartError, Worker, end_in_words
from headrace.runtime.errors import CheckpointError, HeadraceError

# Characters of template source. Templates in common use have up to 20,000; 50,000 compile in under 2 s and 256 MB.
MAX_SOURCE = 50_000

_MEMORY_PER_BYTE = 384  # of a job: long conversations take more
_MAX_MEMORY = 640_000_000  # bytes, however long the conversation is
_MAX_ANSWER = 8 * MAX_TEXT  # bytes: a character takes at most 6 in JSON, and 1 for its origin
_LONGEST_ERROR = 200  # characters of a template's own message
_END_S = 10.0  # for the end of a process that has closed its pipes

# Linux limits the address space of the process. Elsewhere this side looks at its resident memory.
_LIMITS_ADDRESS_SPACE = sys.platform == "linux"

# Signals of crashes, which a template can cause.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class TemplateLimits(Struct, frozen=True):
    """The most that one rendering may take.

    seconds: of processor time
    memory: bytes, for a short conversation
    compile_seconds: of processor time before that, for a template that is not compiled yet
    """

    seconds: float = 2.0
    memory: int = 256_000_000
    compile_seconds: float = 2.0


def compile_template(source: str, limits: TemplateLimits) -> None:
    """Compile a template ahead of its first use. Raises CheckpointError for an invalid template."""
    _do("compile", source, {}, limits)


def variables_of(source: str, limits: TemplateLimits) -> frozenset[str]:
    """Return the names of the variables that a template reads. Raises CheckpointError for an invalid template."""
    return frozenset(map(str, _do("names", source, {}, limits)["names"]))


def render_template(source: str, variables: Mapping[str, Any], limits: TemplateLimits) -> TemplateText:
    """Render a template. Raises CheckpointError with one line if the template fails or exceeds a limit.

    variables: JSON data. Plain texts are from outside; a `TemplateText` keeps its origins.
    """
    answer = _do("render", source, variables, limits)
    return TemplateText(answer["text"], answer["origin"])


def _do(action: str, source: str, variables: Mapping[str, Any], limits: TemplateLimits) -> dict[str, Any]:
    """Return the answer to a job. Raises CheckpointError with one line if the template fails."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    answer = _process.answer(action, source, variables, limits)
    if "error" in answer:
        raise CheckpointError(_one_line(answer["error"]))
    return answer


def _one_line(text: str) -> str:
    """Return a message as one short line of printable characters."""
    text = " ".join(text.split())
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


class _KilledError(HeadraceError):
    """The process was killed, and not by the job."""


class TemplateProcess:
    """The process, started when it is needed, and the one job at a time that it does."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._worker: Worker | None = None

    def answer(self, action: str, source: str, variables: Mapping[str, Any], limits: TemplateLimits) -> dict[str, Any]:
        """Return the answer to a job: the fields that `template_worker` gives, or `error`.

        Raises CheckpointError if the job ends the process, EncodingStoppedError if it is to end, HeadraceError if the
        process cannot start or is killed twice.
        """
        # The size of the conversation is known once it is written.
        given = pickle.dumps(variables)
        memory = min(limits.memory + _MEMORY_PER_BYTE * len(given), _MAX_MEMORY)
        kernel_memory = memory if _LIMITS_ADDRESS_SPACE else 0
        job = pickle.dumps(Job(action, source, given, limits.compile_seconds, limits.seconds, kernel_memory, MAX_TEXT))

        try:
            while not self._lock.acquire(timeout=LOOK_S):
                _check_stopped()
            return self._answer(action, job, limits.seconds, memory)
        finally:
            # Ctrl-C can arrive when `acquire` has returned and its result is not stored. An RLock knows its thread, and
            # raises RuntimeError in others. `suppress` would be a call before `release`, where Ctrl-C can arrive, too.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:
                pass

    def _answer(self, action: str, job: bytes, seconds: float, memory: int) -> dict[str, Any]:
        """Return the answer to a job with these limits. This thread has the lock."""
        try:
            try:
                answer = self._send(job, seconds, memory)
            except _KilledError:  # may happen once
                answer = self._send(job, seconds, memory)
            return _checked(action, answer)
        except BaseException:  # Ctrl-C, too: the next job must not get the answer to this one
            self.end()
            raise

    def _send(self, job: bytes, seconds: float, memory: int) -> bytes:
        """Send a job with these limits, and return the answer."""
        worker = self._started()
        check = _job_check(worker.process, len(job) + memory)
        try:
            return worker.answer(job, _MAX_ANSWER, check)
        except (OSError, EOFError):
            raise _failure(worker.process, seconds, memory) from None
        except LongAnswerError as error:
            raise CheckpointError("the chat template failed: its process sent too long an answer") from error

    def _started(self) -> Worker:
        """Return the process, started if none runs."""
        if self._worker is not None and self._worker.has_ended:
            self.end()
        if self._worker is None:
            try:
                self._worker = Worker("headrace.models.text.template_worker")
                self._worker.wait_until_ready(_check_stopped)
            except (OSError, StartError) as error:
                raise _start_error(str(error)) from error
        return self._worker

    def end(self) -> None:
        """End the process, if there is one."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            worker.end()

    def leave(self) -> None:
        """Begin anew in a fork of the program: another thread may have had the lock."""
        self._lock = RLock()
        self._worker = None


def _start_error(reason: str) -> HeadraceError:
    hint = f"check that {sys.executable or 'Python'} runs, and install headrace again if it does not"
    if LANDLOCK_FAILED in reason:
        hint = "the sandbox or container around headrace must allow landlock_* system calls"
    return HeadraceError(f"the process for chat templates cannot be started: {_one_line(reason)}", hint)


def _job_check(process: "subprocess.Popen[bytes]", memory: int) -> Callable[[], None]:
    """Return the check during a job that may take so many bytes on top of those that the process has now."""
    if _LIMITS_ADDRESS_SPACE:
        return _check_stopped
    max_bytes = resident_bytes(process.pid) + memory

    def check() -> None:
        _check_stopped()
        if resident_bytes(process.pid) > max_bytes:
            raise CheckpointError(f"the chat template failed: {_too_much(memory)}")

    return check


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    import psutil  # takes milliseconds, and only jobs that take long need it

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _check_stopped() -> None:
    if is_stopped():
        raise EncodingStoppedError("the chat template was stopped")


def _failure(process: "subprocess.Popen[bytes]", seconds: float, memory: int) -> HeadraceError:
    """Return the error for a process that has ended during a job with these limits."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return CheckpointError("the chat template failed: its process sent no answer")
    if code == -signal.SIGPROF:
        return CheckpointError(f"the chat template failed: it runs for more than {round(seconds, 1):g} seconds")
    if code == OUT_OF_MEMORY:
        return CheckpointError(f"the chat template failed: {_too_much(memory)}")
    if -code in _CRASHES:
        return CheckpointError(f"the chat template failed: its process ended with {end_in_words(code)}")
    return _KilledError(
        f"the process for chat templates ended twice, with {end_in_words(code)}",
        hint="try again; if memory is short, close other programs",
    )


def _too_much(memory: int) -> str:
    return f"it takes more than {memory // 1_000_000} MB"


def _checked(action: str, answer: bytes) -> dict[str, Any]:
    """Return an answer to an action, read from JSON. Raises CheckpointError for one that no sound process sends."""
    try:
        fields: Any = json.loads(answer.decode("utf-8", "surrogatepass"))
        if "error" in fields:
            return {"error": str(fields["error"])}
        if action == "names":
            return {"names": [str(name) for name in fields["names"]]}
        if action == "render":
            text = fields["text"]
            origin = fields["origin"]
            if not isinstance(text, str) or not isinstance(origin, str):
                raise ValueError
            if len(text) != len(origin) or len(text) > MAX_TEXT or origin.strip(OWN + OUTSIDE):
                raise ValueError
            return {"text": text, "origin": origin}
        return {}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError("the chat template failed: its process sent no answer") from error


_process = TemplateProcess()
os.register_at_fork(after_in_child=_process.leave)
