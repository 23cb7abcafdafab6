"""Compilation and rendering of chat templates in a process of their own, with limits on time and memory.

`template_worker` is its program, and the kernel enforces the limits there. One process serves all templates and all
threads of a program, one job at a time: a render takes a millisecond, and a program takes no more than one may take.
The process starts with the first job, and anew after a job that ended it. Ctrl-C, and `stop` of `encoding_ends`, end
the wait for an answer together with the process.

Importing this module imports no jinja2.
"""

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.models.text.encoding import MAX_TEXT, EncodingStoppedError, is_stopped
from headrace.models.text.template_text import OUTSIDE, OWN, TemplateText
from headrace.models.text.template_worker import HEADER, OUT_OF_MEMORY, Job
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
_WORKER_BYTES = 100_000_000  # resident memory of the process itself, with templates that it has compiled

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
    """Return the answer to a job. Raises CheckpointError with one line."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    answer = _process.answer(action, source, variables, limits)
    if error := answer.get("error"):
        raise CheckpointError(_one_line(str(error)))
    return answer


def _one_line(text: str) -> str:
    """Return a message as one short line of printable characters."""
    text = " ".join(text.split())
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 1] + "…"


class TemplateProcess:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, action: str, source: str, variables: Mapping[str, Any], limits: TemplateLimits) -> dict[str, Any]:
        """Return the answer to a job: the fields that `template_worker` gives, or `error`.

        Raises CheckpointError if the job ends the process, EncodingStoppedError if it is to end.
        """
        compile_seconds = max(limits.seconds, limits.compile_seconds)
        # The size of the conversation is known once it is written.
        given = pickle.dumps(variables)
        memory = min(limits.memory + _MEMORY_PER_BYTE * len(given), _MAX_MEMORY)
        kernel_memory = memory if _LIMITS_ADDRESS_SPACE else 0
        job = pickle.dumps(Job(action, source, given, compile_seconds, limits.seconds, kernel_memory, MAX_TEXT))

        while not self._lock.acquire(timeout=_LOOK_S):
            _check_stopped()
        try:
            process = self._started()
            try:
                _write(process, len(job).to_bytes(HEADER) + job)
                answer = _read_answer(process, len(job) + memory)
            except (OSError, EOFError):
                raise CheckpointError(f"the chat template failed: {_reason(process, limits.seconds, memory)}") from None
            return _checked(action, answer)
        except BaseException:  # Ctrl-C, too: the next job must not get the answer to this one
            self.end()
            raise
        finally:
            self._lock.release()

    def _started(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if none runs."""
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._process is None:
            self._process = _start()
        return self._process

    def end(self) -> None:
        """End the process, if there is one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with process:  # closes the pipes, and waits
                pass

    def leave(self) -> None:
        """Leave the process to the program that this one is a fork of. A fork starts its own."""
        self._lock = Lock()
        process = self._process
        self._process = None
        if process is not None:
            process.returncode = 0  # it is no child of this process, which must not wait for it
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()  # or it would not see the end of its input


def _start() -> "subprocess.Popen[bytes]":
    """Start the process, which has no output but its answers, and nothing to do with the terminal."""
    package = sys.modules["headrace"].__file__  # imported: this module is a part of it
    assert package is not None
    folders = [*sys.path, str(Path(package).parent.parent)]
    try:
        return subprocess.Popen(
            [sys.executable or "", "-I", "-S", "-c", _PROGRAM, *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            process_group=0,  # Ctrl-C is for the program alone
        )
    except OSError as error:
        raise HeadraceError(f"the process for chat templates cannot be started: {error}") from error


def _write(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    """Write a job. Raises OSError if the process has ended."""
    assert process.stdin is not None
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[process.stdin.write(remaining) :]


def _read_answer(process: "subprocess.Popen[bytes]", memory: int) -> bytes:
    """Return an answer. Raises EOFError if the process ends first. memory: bytes that it may take for the job."""
    size = int.from_bytes(_read(process, HEADER, memory))
    if size > _MAX_ANSWER:
        raise CheckpointError("the chat template failed: its process sent too long an answer")
    return _read(process, size, memory)


def _read(process: "subprocess.Popen[bytes]", size: int, memory: int) -> bytes:
    """Read so many bytes of an answer, while looking at the reasons to end the wait."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        while not poll.poll(1000 * _LOOK_S):
            _check_stopped()
            if not _LIMITS_ADDRESS_SPACE and resident_bytes(process.pid) > _WORKER_BYTES + memory:
                raise CheckpointError(f"the chat template failed: {_too_much(memory)}")
        part = process.stdout.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


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


def _reason(process: "subprocess.Popen[bytes]", seconds: float, memory: int) -> str:
    """Return why a process has ended during a job with these limits."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "its process sent no answer"
    if code == -signal.SIGPROF:
        return f"it runs for more than {round(seconds, 1):g} seconds"
    if code == OUT_OF_MEMORY:
        return _too_much(memory)
    if code < 0:
        return f"it ended its process with {signal.Signals(-code).name}"
    return f"it ended its process with status {code}"


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
            text, origin = fields["text"], fields["origin"]
            if len(text) != len(origin) or len(text) > MAX_TEXT or origin.strip(OWN + OUTSIDE):
                raise ValueError
            return {"text": str(text), "origin": str(origin)}
        return {}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError("the chat template failed: its process sent no answer") from error


_process = TemplateProcess()
atexit.register(_process.end)
os.register_at_fork(after_in_child=_process.leave)
