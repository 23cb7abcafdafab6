"""headrace as processes, on Linux forked from one that has already imported the modules.

A command, server or engine has its own process, streams, environment, working directory and session; only the start of
the interpreter and the imports are shared. So have the processes for chat templates that these start. The machine is
measured briefly.
`tests/app/cli/test_processes.py` runs each command once in an interpreter of its own.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.patience import PATIENCE_S

HEADRACE = (sys.executable, "-m", "headrace")
SLOW_FIRST_PASS = "SLOW_FIRST_PASS"
"""Variable that gives forked processes, and those that they fork, a slow first pass."""
_ENGINE = "/app/engine/start.py"
_IMPORTED = (
    "filelock", "httpx2", "jinja2.sandbox", "mlx.core", "mlx.nn", "mlx_lm.utils", "numpy", "rich.console", "starlette",
    "tokenizers", "tqdm.auto", "uvicorn", "yaml", "headrace.app.api", "headrace.app.bench.measure.run",
    "headrace.app.cli.batch", "headrace.app.cli.bench.command", "headrace.app.cli.commands", "headrace.app.cli.main",
    "headrace.app.cli.models", "headrace.app.cli.predict", "headrace.app.cli.process", "headrace.app.cli.run.answer",
    "headrace.app.cli.run.command", "headrace.app.cli.serve", "headrace.app.cli.sessions",
    "headrace.app.cli.standard_streams", "headrace.app.cli.verify", "headrace.app.engine.host",
    "headrace.app.engine.process", "headrace.app.server.serve", "headrace.models.loading.load",
    "headrace.models.text.template_sandbox", "headrace.runtime.engine.engine",
)  # fmt: skip
# Variables that the interpreter, the dynamic linker or an imported library reads at its start. TOKENIZERS_PARALLELISM
# is none: it is read for each call, and each test process has it once it has loaded a tokenizer.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "MLX_", "LANG", "LC_")
_FIRST_ENVIRONMENT = dict(os.environ)
_STARTS_OTHERS = ("chat", "launch", "serve", "verify")  # commands that start a server or an engine
_SHOWN = 4096  # bytes of the arguments and of the variables of a forked process that others can read
_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}  # number of the system call
_MESSAGE = 1 << 20


def headrace(
    *arguments: str | Path,
    home: Path | None = None,
    stdin: bytes = b"",
    code: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run headrace to its end. Raises AssertionError if it exits with another code than `code`."""
    command = [*HEADRACE, *map(str, arguments)]
    variables = {**os.environ, **environment}
    if home is not None:
        variables["HEADRACE_HOME"] = str(home)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        process = ForkedProcess(command, stdin=given, stdout=out, stderr=errors, env=variables, start_new_session=True)
        try:
            returned = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        out.seek(0)
        errors.seek(0)
        texts = out.read().decode(), errors.read().decode()
    if code is not None:
        assert returned == code, texts[1]
    return subprocess.CompletedProcess(command, returned, *texts)


class ForkedProcess(subprocess.Popen[Any]):
    """A child process, forked if it is headrace or an engine with an environment that can be forked.

    Takes the arguments of `subprocess.Popen`, which starts all other programs.
    """

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, start_new_session, _ = more
        streams = [stream if given == -1 else given for stream, given in enumerate((p2cread, c2pwrite, errwrite))]
        pid = None
        if _is_template_worker(args):
            pid = _fork_template_worker(args, env, streams)
        elif isinstance(args, list) and preexec_fn is None:
            numbered = {**dict(enumerate(streams)), **{number: number for number in pass_fds}}
            environment = os.environ if env is None else env
            pid = fork_headrace(args, environment, cwd, new_session=start_new_session, descriptors=numbered)
        if pid is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def fork_headrace(
    command: Sequence[Any],
    environment: Mapping[str, str],
    folder: Any,
    *,
    new_session: bool,
    descriptors: Mapping[int, int],
) -> int | None:
    """Return the id of a forked child process, or None if the command needs an interpreter of its own.

    folder: its working directory; None for this process's.
    new_session: a terminal among its streams becomes its controlling terminal.
    descriptors: our files by their numbers there; 0, 1 and 2 among them.
    """
    if not (_is_headrace(command) or _is_engine(command)):
        return None
    template = _find_template(environment)
    if template is None:
        return None
    request = {
        "command": [*map(str, command)],
        "environment": dict(environment),
        "folder": str(folder or Path.cwd()),
        "new_session": new_session,
        "numbers": [*descriptors],
    }
    return template.fork(request, [*descriptors.values()])


def fork_engines() -> None:
    """Let this process fork the engines and servers that it starts from now on."""
    from headrace.app.cli.launch import command
    from headrace.app.engine import link

    for module in (command, link):
        module.subprocess = _SubprocessForks()  # type: ignore[attr-defined]


class _SubprocessForks:
    """The module `subprocess`, whose Popen forks."""

    Popen = ForkedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def _is_headrace(command: Sequence[str]) -> bool:
    return tuple(command[:3]) == HEADRACE


def _is_template_worker(command: Any) -> bool:
    """Return whether `Worker` starts a process for chat templates."""
    return isinstance(command, list) and command[5:6] == ["headrace.models.text.template_worker"]


def _is_engine(command: Sequence[str]) -> bool:
    return len(command) > 2 and command[0] == HEADRACE[0] and command[2].endswith(_ENGINE)


def _starts_others(command: Sequence[str]) -> bool:
    """Return whether this command starts a server or an engine. One without a name is a chat."""
    words = command[len(HEADRACE) :]
    return not words or words[0].startswith("-") or any(name in words for name in _STARTS_OTHERS)


def _find_template(environment: Mapping[str, str]) -> "_Template | None":
    """Return the template of processes with this environment; None if they need an interpreter of their own."""
    if sys.platform != "linux" or platform.machine() not in _CLONE:
        return None
    if _chosen(environment, _READ_AT_START) != _chosen(_FIRST_ENVIRONMENT, _READ_AT_START):
        return None
    return _inherited or _start_template()


def _chosen(environment: Mapping[str, str], beginnings: tuple[str, ...]) -> dict[str, str]:
    """Return the variables whose names begin in one of these ways."""
    return {name: value for name, value in environment.items() if name.startswith(beginnings)}


class _Template:
    """A child process that has imported the modules, and forks siblings of it: children of this process.

    It ends with its socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Return the id of a new child of this process."""
        with self._lock, tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._socket, [b"fork"], [file.fileno(), *descriptors])
            return int(self._socket.recv(_MESSAGE))

    def close(self) -> None:
        self._socket.close()


_inherited: _Template | None = None  # of a process that was forked itself


@functools.cache
def _start_template() -> _Template:
    """Start an interpreter that imports the modules."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"from tests.support.commands import serve; serve({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code + " " * _SHOWN],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
            env={
                **_FIRST_ENVIRONMENT,
                "OPENBLAS_NUM_THREADS": "1",  # no thread before a fork
                "SPACE_FOR_VARIABLES": " " * _SHOWN,
            },
        )
    template = _Template(ours)

    def end() -> None:
        template.close()
        process.wait(PATIENCE_S)

    atexit.register(end)
    return template


def serve(number: int) -> None:
    """Import the modules, and fork processes for requests on this socket, until it is closed."""
    for name in _IMPORTED:
        importlib.import_module(name)
    from headrace.models.text import worker
    from tests.support.steady import measure_machine_briefly

    for name in ("OPENBLAS_NUM_THREADS", "SPACE_FOR_VARIABLES"):
        del _FIRST_ENVIRONMENT[name]
    gc.freeze()  # a collection in a fork would copy the pages of all of these objects
    measure_machine_briefly()
    fork_engines()
    worker.subprocess = _SubprocessForks()  # type: ignore[assignment]
    _serve(socket.socket(fileno=number))


def _serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the processes that it forked
    with requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 16, 16)
            if not message:
                return
            pid = _fork_sibling()
            if not pid:
                requests.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _run(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(str(pid).encode())


def _fork_sibling() -> int:
    """Fork a child of this process's parent, which `os.fork` cannot. No other thread may run."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def _fork_template_worker(command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> int:
    """Return the id of a child process that renders chat templates, forked from this process.

    An interpreter of its own takes as much processor time to start as the rest of a short command.
    """
    pid = os.fork()
    if not pid:
        _render_templates(command, environment, streams)
    return pid


def _render_templates(command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Do the jobs of a process for chat templates, in a fork of a program of several threads.

    Only this thread exists here. The others may have held Python's streams, so these are opened anew.
    """
    from headrace.models.text import template_worker

    try:
        _show(command, environment)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _move(streams, range(3))
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = io.TextIOWrapper(open(0, "rb"))  # noqa: SIM115 - until the end of the process
        sys.stdout = io.TextIOWrapper(open(1, "wb"))  # noqa: SIM115
        template_worker.main()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(1)  # `main` ends the process by itself


def _inherit_template() -> None:
    """Fork a template of this process's own, before its threads start."""
    global _inherited
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.close(null)
        _serve(theirs)
        os._exit(0)
    theirs.close()
    _inherited = _Template(ours)


def _run(descriptors: Sequence[int]) -> NoReturn:
    """Run what is requested in this forked process, and exit as an interpreter does.

    Only the teardown of modules is left out: it would touch the pages of all of them, which takes ten times as long as
    the fork.
    """
    with os.fdopen(descriptors[0]) as file:
        file.seek(0)
        request = json.load(file)
    command: list[str] = request["command"]
    numbers: list[int] = request["numbers"]
    _move(descriptors[1:], numbers)
    if request["new_session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    importlib.reload(sys.modules["huggingface_hub.constants"])  # reads its variables at its import
    _show(command, request["environment"])
    sys.argv = command[2:] if _is_engine(command) else ["headrace", *command[3:]]
    if _starts_others(command):
        _inherit_template()
    if SLOW_FIRST_PASS in request["environment"]:
        from tests.support.slow_first_pass import slow_first_pass

        slow_first_pass()
    code: Any = 0
    try:
        if _is_engine(command):
            from headrace.app.engine import process

            process.main(int(command[-1]))
        else:
            from headrace.app.cli.main import main

            main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        code = 120  # as an interpreter does
    os._exit((code or 0) & 0xFF)


def _move(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers."""
    free = max(*descriptors, *numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write the command and its variables to where the system reads them for other processes."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]  # begin and end of the arguments, then of the variables
    texts = [command, [f"{name}={value}" for name, value in environment.items()]]
    for start, end, lines in zip(places[::2], places[1::2], texts, strict=True):
        data = "".join(f"{line}\0" for line in lines).encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
