"""Compilation and rendering of chat templates in a process of their own, with limits on time and memory.

`template_worker` is its program (see `worker`), and the kernel enforces the limits there. One process serves all
templates and all threads of a program, one job at a time: a render takes a millisecond. The process starts with the
first job, and anew after a job that ended it. Ctrl-C, and `stop` of `encoding_ends`, end the wait for an answer and the
process.

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
from collections.abc import Mapping
from threading import Lock
from typing import Any

from headrace.models.text.encoding import MAX_TEXT, EncodingStoppedError, is_stopped
from headrace.models.text.template_text import OUTSIDE, OWN, TemplateText
from headrace.models.text.template_worker import MAX_MEMORY, OUT_OF_MEMORY, Job
from headrace.models.text.worker import LongAnswerError, StartError, Worker, end_in_words
from headrace.runtime.errors import CheckpointError, HeadraceError

# Characters of template source. Templates in common use have up to 20,000; 50,000 compile in under 2 s.
MAX_SOURCE = 50_000
SECONDS = 2.0  # of processor time, to compile a template, and to render a short conversation

_MAX_ANSWER = 8 * MAX_TEXT  # bytes: a character takes at most 6 in JSON, and 1 for its origin
_LONGEST_ERROR = 200  # characters of a template's own message
_END_S = 10.0  # for the end of a process that has closed its pipes

# Signals of crashes, which a template can cause.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def variables_of(source: str) -> frozenset[str]:
    """Compile a template, and return the names of its variables. Raises CheckpointError for an invalid template."""
    return frozenset(map(str, _do(source, None, SECONDS)["names"]))


def render_template(source: str, variables: Mapping[str, Any], seconds: float = SECONDS) -> TemplateText:
    """Render a template. Raises CheckpointError with one line if the template fails or exceeds a limit.

    variables: JSON data. Plain texts are from outside; a `TemplateText` keeps its origins.
    seconds: of processor time
    """
    answer = _do(source, variables, seconds)
    return TemplateText(answer["text"], answer["origin"])


def _do(source: str, variables: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    """Return the answer to a job. Raises CheckpointError with one line if the template fails."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    answer = _process.answer(Job(source, variables, SECONDS, seconds, MAX_TEXT))
    if "error" in answer:
        raise CheckpointError(_one_line(answer["error"]))
    return answer


def _one_line(text: str) -> str:
    """Return a message as one short line of printable characters."""
    text = " ".join(text.split())
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


class TemplateProcess:
    """The process, started when it is needed, and the one job at a time that it does."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: Worker | None = None

    def answer(self, job: Job) -> dict[str, Any]:
        """Return the answer to a job: the fields that `template_worker` gives, or `error`.

        Raises CheckpointError if the job ends the process, EncodingStoppedError if it is to end, HeadraceError if the
        process cannot start or is killed.
        """
        with self._lock:
            try:
                return _checked(job, self._send(job))
            except BaseException:  # Ctrl-C, too: the next job must not get the answer to this one
                self.end()
                raise

    def _send(self, job: Job) -> bytes:
        """Send a job, and return the answer. This thread has the lock."""
        worker = self._started()
        try:
            return worker.answer(pickle.dumps(job), _MAX_ANSWER, _check_stopped)
        except (OSError, EOFError):
            raise _failure(worker.process, job.seconds) from None
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
                raise HeadraceError(
                    f"the process for chat templates cannot be started: {_one_line(str(error))}",
                    f"check that {sys.executable or 'Python'} runs, and install headrace again if it does not",
                ) from error
        return self._worker

    def end(self) -> None:
        """End the process, if there is one."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            worker.end()

    def leave(self) -> None:
        """Begin anew in a fork of the program: another thread may have had the lock."""
        self._lock = Lock()
        self._worker = None


def _check_stopped() -> None:
    if is_stopped():
        raise EncodingStoppedError("the chat template was stopped")


def _failure(process: "subprocess.Popen[bytes]", seconds: float) -> HeadraceError:
    """Return the error for a process that has ended during a job of so many seconds."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return CheckpointError("the chat template failed: its process sent no answer")
    if code == -signal.SIGPROF:
        return CheckpointError(f"the chat template failed: it runs for more than {round(seconds, 1):g} seconds")
    if code == OUT_OF_MEMORY:
        return CheckpointError(f"the chat template failed: it takes more than {MAX_MEMORY // 1_000_000} MB")
    if -code in _CRASHES:
        return CheckpointError(f"the chat template failed: its process ended with {end_in_words(code)}")
    return HeadraceError(
        f"the process for chat templates ended with {end_in_words(code)}",
        hint="try again; if memory is short, close other programs",
    )


def _checked(job: Job, answer: bytes) -> dict[str, Any]:
    """Return an answer to a job, read from JSON. Raises CheckpointError for one that no sound process sends."""
    try:
        fields: Any = json.loads(answer.decode("utf-8", "surrogatepass"))
        if "error" in fields:
            return {"error": str(fields["error"])}
        if job.variables is None:
            return {"names": [str(name) for name in fields["names"]]}
        text = fields["text"]
        origin = fields["origin"]
        if not isinstance(text, str) or not isinstance(origin, str):
            raise ValueError
        if len(text) != len(origin) or len(text) > MAX_TEXT or origin.strip(OWN + OUTSIDE):
            raise ValueError
        return {"text": text, "origin": origin}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError("the chat template failed: its process sent no answer") from error


_process = TemplateProcess()
os.register_at_fork(after_in_child=_process.leave)
