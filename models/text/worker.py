"""Worker processes: another process of this interpreter, which does one job at a time and sends an answer to each.

For code from outside that nothing can end within a process: chat templates (`template_process`, `template_worker`) and
the compilation of grammars (`structured.trial`). The process gives itself limits of processor time and memory, and the
kernel ends it beyond them. The job is then refused, and the next one starts another process.

`Worker` is the program's side; `jobs` and `send_answer` are the process's. A job or an answer is its length in _HEADER
bytes, and its content. Ctrl-C is for the program alone. The process ends with the program, as its input does.

Guards: tests/models/text/test_template_process.py, tests/models/text/structured/test_grammars.py.
"""

import atexit
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from threading import Event, current_thread, main_thread
from typing import IO, TYPE_CHECKING
from weakref import WeakSet, finalize

if TYPE_CHECKING:
    import subprocess

LOOK_S = 0.1  # between calls of a job's `check`
_HEADER = 8  # bytes before a job or an answer: its length
_READY = b"+"  # before the first answer

# The interpreter skips `site`, and so all variables and start files of Python, but has the same modules.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from importlib import import_module as i; i(sys.argv[1]).main()"
# Variables that the process gets: the time zone, and folders without which some interpreters do not start.
_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def _wait_on() -> None:
    """Do nothing: the process's own limits end the wait."""


class StartError(Exception):
    """The process ended before its first job. The text is its last line, or how it ended."""


class LongAnswerError(Exception):
    """The process began an answer of more bytes than it may have."""


class Worker:
    """A process that runs `main` of a module. It is killed at the end of the program, or with its `Worker`."""

    def __init__(self, module: str) -> None:
        """Start the process, without waiting for it. Raises OSError if that is impossible."""
        import subprocess  # late: the process imports this module, too, and starts none
        from pathlib import Path

        _stay_at_the_end()
        package = sys.modules["headrace"].__file__  # imported: this module is a part of it
        assert package is not None
        self.process = subprocess.Popen(
            [sys.executable or "", "-I", "-S", "-c", _PROGRAM, module, *sys.path, str(Path(package).parent.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            process_group=0,  # Ctrl-C is for the program alone
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self.end = finalize(self, _end, self.process)  # ends the process and closes its pipes, when called or collected
        self.end.atexit = False
        _workers.add(self)

    def wait_until_ready(self, check: Callable[[], None] = _wait_on) -> None:
        """Wait until the process asks for its first job. Raises StartError if it ends first. check: see `answer`."""
        stderr = self.process.stderr
        assert stderr is not None
        try:
            is_ready = self._read(len(_READY), check) == _READY
        except EOFError:
            is_ready = False
        if not is_ready:
            self.process.kill()
            lines = [line for line in stderr.read().decode(errors="replace").split("\n") if line.strip()]
            if lines:
                raise StartError(lines[-1])
            raise StartError(f"it ended with {end_in_words(self.process.wait())}")
        stderr.close()  # nobody reads it from now on

    @property
    def has_ended(self) -> bool:
        """True if no process is there to do another job."""
        return self.process.poll() is not None

    def answer(self, job: bytes, max_bytes: int, check: Callable[[], None] = _wait_on) -> bytes:
        """Return the answer to a job. Raises OSError or EOFError if the process ends first, and LongAnswerError.

        After any error, and after Ctrl-C, the caller has to `end` the process: another job would get this one's answer.

        job: not empty.
        max_bytes: of the answer.
        check: called while the job takes long; its error ends the wait.
        """
        self._write(len(job).to_bytes(_HEADER) + job, check)
        size = int.from_bytes(self._read(_HEADER, check))
        if size > max_bytes:
            raise LongAnswerError
        return self._read(size, check)

    def kill(self) -> None:
        """Kill the process at the end of the program. Its pipes stay open: a thread may be reading an answer."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Leave the process to the program that this one is a fork of."""
        self.process.returncode = 0  # it is no child of this program, which must neither kill it nor wait for it
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()  # or the process would not see the end of its input

    def _write(self, data: bytes, check: Callable[[], None]) -> None:
        """Write to the process. Raises OSError if it has ended."""
        stdin = self.process.stdin
        assert stdin is not None
        remaining = memoryview(data)
        while remaining:
            _wait(stdin, select.POLLOUT, check)
            try:
                size = stdin.write(remaining) or 0  # None if the pipe is full again
            except OSError:
                _stay_at_the_end()
                raise
            remaining = remaining[size:]

    def _read(self, size: int, check: Callable[[], None]) -> bytes:
        """Read so many bytes of the process's output. Raises EOFError if it ends first."""
        stdout = self.process.stdout
        assert stdout is not None
        data = bytearray()
        while len(data) < size:
            _wait(stdout, select.POLLIN, check)
            part = stdout.read(size - len(data))
            if not part:
                _stay_at_the_end()
                raise EOFError
            data += part
        return bytes(data)


def _wait(pipe: "IO[bytes]", event: int, check: Callable[[], None]) -> None:
    """Wait until a pipe can be read or written."""
    poll = select.poll()
    poll.register(pipe, event)
    while not poll.poll(1000 * LOOK_S):
        check()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, and close its pipes."""
    process.kill()
    with process:  # closes the pipes, and waits
        pass


def end_in_words(code: int) -> str:
    """Return the words for the return code of a process."""
    return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"status {code}"


_workers: "WeakSet[Worker]" = WeakSet()
_is_ending = Event()  # the program


def _stay_at_the_end() -> None:
    """Keep a thread for good that the end of the program has left without a process, or that needs one then.

    Such a thread is a daemon: Python has waited for the others. It has nobody to report an error to, and Python would
    print it. The main thread goes on, as its handlers of the end may need a process.
    """
    if _is_ending.is_set() and current_thread() is not main_thread():
        Event().wait()


def _kill_all() -> None:
    """Kill all processes at the end of the program."""
    _is_ending.set()
    for worker in list(_workers):
        worker.kill()


def _leave_all() -> None:
    """Leave all processes to the parent of a fork, which starts its own.

    Modules that import this one register their functions for forks later, and Python calls these in order of
    registration. So a `Worker` that they drop in the fork does not kill the parent's process.
    """
    for worker in list(_workers):
        worker.leave()


atexit.register(_kill_all)
os.register_at_fork(after_in_child=_leave_all)


# --- in the process ----------------------------------------------------------------------------------------


def jobs() -> Iterator[bytes]:
    """Yield the jobs of the program, until it ends or wants no more. Each needs a `send_answer` before the next."""
    _send(_READY)
    source = sys.stdin.buffer
    while job := source.read(int.from_bytes(source.read(_HEADER))):
        yield job


def send_answer(answer: bytes) -> None:
    """Send the answer to the newest job."""
    _send(len(answer).to_bytes(_HEADER) + answer)


def _send(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
