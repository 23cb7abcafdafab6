"""headrace commands as processes, on Linux forked from one that has already imported the modules.

A command has its own process, streams, environment, working directory and session; only the start of the interpreter
and the imports are shared. The machine is measured briefly.
`tests/app/cli/test_processes.py` runs each command once in an interpreter of its own.
"""

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.patience import PATIENCE_S

HEADRACE = (sys.executable, "-m", "headrace")
_IMPORTED = (
    "jinja2.sandbox", "mlx.core", "mlx_lm.utils", "numpy", "tokenizers", "headrace.app.api",
    "headrace.app.bench.measure.run", "headrace.app.cli.batch", "headrace.app.cli.bench.command",
    "headrace.app.cli.models", "headrace.app.cli.predict", "headrace.app.cli.run.command",
    "headrace.app.cli.run.answer", "headrace.app.cli.sessions", "headrace.app.cli.verify",
    "headrace.models.loading.load", "headrace.runtime.engine.engine",
)  # fmt: skip
_IMPORTS_HUB = "mlx_lm.utils"  # imports huggingface_hub, which reads its variables then
# Variables that the interpreter, the dynamic linker or an imported library reads at its start. TOKENIZERS_PARALLELISM
# is none: it is read for each call, and each test process has it once it has loaded a tokenizer.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "MLX_", "LANG", "LC_")
_READ_BY_HUB = ("HF_",)
_FIRST_ENVIRONMENT = dict(os.environ)
_MESSAGE = 1 << 20


def headrace(
    *arguments: str | Path,
    home: Path | None = None,
    stdin: bytes = b"",
    code: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run headrace to its end. Raises AssertionError if it exits with another code than `code`."""
    command = [*map(str, arguments)]
    variables = {**os.environ, **environment}
    if home is not None:
        variables["HEADRACE_HOME"] = str(home)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        files = (given, out, errors)
        if sys.platform == "linux" and _chosen(variables, _READ_AT_START) == _chosen(
            _FIRST_ENVIRONMENT, _READ_AT_START
        ):
            starter = _starter(
                imports_hub=_chosen(variables, _READ_BY_HUB) == _chosen(_FIRST_ENVIRONMENT, _READ_BY_HUB)
            )
            returned = starter.run(command, variables, [file.fileno() for file in files])
        else:
            returned = subprocess.run(
                [*HEADRACE, *command], stdin=given, stdout=out, stderr=errors, env=variables, timeout=PATIENCE_S
            ).returncode
        out.seek(0)
        errors.seek(0)
        texts = out.read().decode(), errors.read().decode()
    if code is not None:
        assert returned == code, texts[1]
    return subprocess.CompletedProcess([*HEADRACE, *command], returned, *texts)


def _chosen(environment: Mapping[str, str], beginnings: tuple[str, ...]) -> dict[str, str]:
    """Return the variables whose names begin in one of these ways."""
    return {name: value for name, value in environment.items() if name.startswith(beginnings)}


@functools.cache
def _starter(*, imports_hub: bool) -> "_Starter":
    return _Starter(imports_hub)


class _Starter:
    """The process that forks one command at a time. It ends with its socket.

    imports_hub: it has imported what reads the variables of huggingface_hub, so that its commands cannot have others.
    """

    def __init__(self, imports_hub: bool) -> None:
        imported = [name for name in _IMPORTED if imports_hub or name != _IMPORTS_HUB]
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from tests.support.commands import serve; serve({theirs.fileno()}, {imported})",
                ],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
                env={**_FIRST_ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},  # no thread before a fork
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait(PATIENCE_S)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> int:
        """Return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        with self._lock, tempfile.TemporaryFile() as request:
            request.write(json.dumps([list(arguments), dict(environment), str(Path.cwd())]).encode())
            request.flush()
            socket.send_fds(self._socket, [b"run"], [request.fileno(), *streams])
            pid = int(self._socket.recv(_MESSAGE))
            self._socket.settimeout(PATIENCE_S)
            try:
                return int(self._socket.recv(_MESSAGE))
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                self._socket.settimeout(None)
                self._socket.recv(_MESSAGE)
                raise subprocess.TimeoutExpired([*HEADRACE, *arguments], PATIENCE_S) from None
            finally:
                self._socket.settimeout(None)


def serve(number: int, imported: Sequence[str]) -> None:
    """Import these modules, and fork commands for requests on this socket, until it is closed."""
    import importlib

    for name in imported:
        importlib.import_module(name)
    from tests.support.steady import measure_machine_briefly

    gc.freeze()  # a collection in a fork would copy the pages of all of these objects
    measure_machine_briefly()
    with socket.socket(fileno=number) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 16, 4)
            if not message:
                return
            pid = os.fork()
            if not pid:
                requests.close()
                _command(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(str(pid).encode())
            requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _command(descriptors: Sequence[int]) -> NoReturn:
    """Run the requested command in this forked process, and exit as an interpreter does.

    Only the teardown of modules is left out: it would touch the pages of all of them, which takes ten times as long as
    the fork.
    """
    with os.fdopen(descriptors[0]) as request:
        request.seek(0)
        arguments, environment, folder = json.load(request)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.argv = ["headrace", *arguments]
    from headrace.app.cli.main import main

    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        code = 120  # as an interpreter does
    os._exit(code & 0xFF)
