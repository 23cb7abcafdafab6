"""Compilation and rendering of chat templates in a process of their own, with limits on time and memory.

`template_worker` is its program, and the kernel enforces the limits there. One process serves all templates and all
threads of a program, one job at a time: a render takes a millisecond, and a program takes no more than one may take.
The process starts with the first job, and anew after a job that ended it. Ctrl-C, and `stop` of `encoding_ends`, end
the wait for an answer together with the process.

CheckpointError means that the template fails, which callers may remember. A plain HeadraceError is no fault of the
template: the process cannot start, or something else kills it, as Linux does when memory is short.

Importing this module imports no jinja2.

Guard: tests/models/text/test_template_process.py.
"""

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import IO, Any

from headrace.models.text.encoding import MAX_TEXT, EncodingStoppedError, is_stopped
from headrace.models.text.template_text import OUTSIDE, OWN, TemplateText
from headrace.models.text.template_worker import HEADER, OUT_OF_MEMORY, READY, Job
from headrace.runtime.errors import CheckpointError, HeadraceError

# Characters of template source. Templates in common use have up to 20,000; 50,000 compile in under 2 s and 256 MB.
MAX_SOURCE = 50_000

_MEMORY_PER_BYTE = 384  # of a job: long conversations take more
_MAX_MEMORY = 640_000_000  # bytes, however long the conversation is
_MAX_ANSWER = 8 * MAX_TEXT  # bytes: a character takes at most 6 in JSON, and 1 for its origin
_LONGEST_ERROR = 200  # characters of a template's own message
_LOOK_S = 0.1  # between looks at a job that takes long
_END_S = 10.0  # for the end of a process that has closed its pipes

# Linux limits the address space of the process. Elsewhere this side looks at its resident memory.
_LIMITS_ADDRESS_SPACE = sys.platform == "linux"

# Signals of crashes, which a template can cause.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

# The interpreter skips `site`, and so all variables and start files of Python, but has the same modules.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from headrace.models.text.template_worker import main; main()"
# Variables that the process gets: the time zone, and folders without which some interpreters do not start.
_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


@dataclass(frozen=True)
class TemplateLimits:
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
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process: subprocess.Popen[bytes] | None = None

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
            while not self._lock.acquire(timeout=_LOOK_S):
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
        process = self._started()
        check = _job_check(process, len(job) + memory)
        try:
            _write(process, len(job).to_bytes(HEADER) + job, check)
            return _read_answer(process, check)
        except (OSError, EOFError):
            raise _failure(process, seconds, memory) from None

    def _started(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if none runs."""
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._process is None:
            self._process = _start()
            _wait_until_ready(self._process)
        return self._process

    def end(self) -> None:
        """End the process, if there is one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with process:  # closes the pipes, and waits
                pass

    def kill(self) -> None:
        """Kill the process at the end of the program. Its pipes stay open: a thread may be reading an answer."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def leave(self) -> None:
        """Leave the process to the program that this one is a fork of. A fork starts its own."""
        self._lock = RLock()
        process = self._process
        self._process = None
        if process is not None:
            process.returncode = 0  # it is no child of this process, which must not wait for it
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()  # or it would not see the end of its input


def _start() -> "subprocess.Popen[bytes]":
    """Start the process, which has no output but its answers, and nothing to do with the terminal."""
    package = sys.modules["headrace"].__file__  # imported: this module is a part of it
    assert package is not None
    folders = [*sys.path, str(Path(package).parent.parent)]
    try:
        process = subprocess.Popen(
            [sys.executable or "", "-I", "-S", "-c", _PROGRAM, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            process_group=0,  # Ctrl-C is for the program alone
        )
    except OSError as error:
        raise _start_error(str(error)) from error
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process has imported its modules. Raises HeadraceError with its last line if it ends first."""
    assert process.stderr is not None
    try:
        is_ready = _read(process, len(READY), _check_stopped) == READY
    except EOFError:
        is_ready = False
    if not is_ready:
        process.kill()
        lines = process.stderr.read().decode(errors="replace").split("\n")
        written = [line for line in lines if line.strip()]
        raise _start_error(written[-1] if written else f"it ended with {_end_of(process.wait())}")
    process.stderr.close()  # nobody reads it from now on


def _start_error(reason: str) -> HeadraceError:
    return HeadraceError(
        f"the process for chat templates cannot be started: {_one_line(reason)}",
        hint=f"check that {sys.executable or 'Python'} runs, and install headrace again if it does not",
    )


def _wait(pipe: "IO[bytes]", event: int, check: Callable[[], None]) -> None:
    """Wait until a pipe can be read or written. check: raises an error to end the wait."""
    poll = select.poll()
    poll.register(pipe, event)
    while not poll.poll(1000 * _LOOK_S):
        check()


def _write(process: "subprocess.Popen[bytes]", data: bytes, check: Callable[[], None]) -> None:
    """Write a job. Raises OSError if the process has ended. check: see `_wait`."""
    assert process.stdin is not None
    remaining = memoryview(data)
    while remaining:
        _wait(process.stdin, select.POLLOUT, check)
        size = process.stdin.write(remaining) or 0  # None if the pipe is full again
        remaining = remaining[size:]


def _read_answer(process: "subprocess.Popen[bytes]", check: Callable[[], None]) -> bytes:
    """Return an answer. Raises EOFError if the process ends first. check: see `_wait`."""
    size = int.from_bytes(_read(process, HEADER, check))
    if size > _MAX_ANSWER:
        raise CheckpointError("the chat template failed: its process sent too long an answer")
    return _read(process, size, check)


def _read(process: "subprocess.Popen[bytes]", size: int, check: Callable[[], None]) -> bytes:
    """Read so many bytes of the output. check: see `_wait`."""
    assert process.stdout is not None
    data = bytearray()
    while len(data) < size:
        _wait(process.stdout, select.POLLIN, check)
        part = process.stdout.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


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
        return CheckpointError(f"the chat template failed: its process ended with {_end_of(code)}")
    return _KilledError(
        f"the process for chat templates ended twice, with {_end_of(code)}",
        hint="try again; if memory is short, close other programs",
    )


def _end_of(code: int) -> str:
    """Return the words for the return code of a process."""
    return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"status {code}"


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
atexit.register(_process.kill)
os.register_at_fork(after_in_child=_process.leave)
