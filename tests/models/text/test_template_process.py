"""The process for chat templates: its start and end, the wait for it, and what it cannot do."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.models.text import template_process
from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.encoding import EncodingStoppedError, encoding_ends
from headrace.models.text.template_process import MAX_TEXT, SECONDS, TemplateProcess, render_template
from headrace.models.text.template_text import TemplateText
from headrace.models.text.template_worker import Job
from headrace.models.text.worker import Worker, end_in_words
from headrace.runtime.errors import CheckpointError, HeadraceError
from tests.support.patience import PATIENCE_S

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def _pid(process: TemplateProcess) -> int:
    assert process._worker is not None
    return process._worker.process.pid


def _job(source: str, variables: dict[str, Any]) -> Job:
    return Job(source, variables, SECONDS, SECONDS, MAX_TEXT)


def _render(process: TemplateProcess, source: str, **variables: Any) -> str:
    return str(process.answer(_job(source, variables))["text"])


@pytest.fixture
def process() -> Any:
    process = TemplateProcess()
    yield process
    process.end()


def test_one_process_serves_all_templates(process: TemplateProcess) -> None:
    assert _render(process, "{{ x }}", x="a") == "a"
    pid = _pid(process)
    assert _render(process, "{{ y }}!", y=1) == "1!"
    assert _pid(process) == pid


def test_a_process_that_ended_is_replaced(process: TemplateProcess) -> None:
    assert _render(process, "a") == "a"
    os.kill(_pid(process), signal.SIGKILL)
    psutil.wait_procs([psutil.Process(_pid(process))], PATIENCE_S)
    assert _render(process, "b") == "b"


def _end_in_jobs(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
    """End the process with a signal in each of the next `times` jobs."""
    answer = Worker.answer
    remaining = times

    def end_and_answer(worker: Worker, job: bytes, max_bytes: int, check: Callable[[], None]) -> bytes:
        nonlocal remaining
        if remaining > 0:
            remaining -= 1
            worker.process.send_signal(number)
            worker.process.wait(PATIENCE_S)
        return answer(worker, job, max_bytes, check)

    monkeypatch.setattr(Worker, "answer", end_and_answer)


def test_a_process_that_is_killed_is_no_fault_of_the_template(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    _end_in_jobs(monkeypatch, signal.SIGKILL, 1)
    with pytest.raises(HeadraceError, match=r"ended with signal 9 \(Killed") as caught:
        _render(process, "a")
    assert not isinstance(caught.value, CheckpointError)
    assert caught.value.hint
    assert _render(process, "a") == "a"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_the_fault_of_the_template(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _end_in_jobs(monkeypatch, number, 1)
    with pytest.raises(CheckpointError, match=f"its process ended with signal {number}"):
        _render(process, "a")


def test_a_killed_trial_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial finds whether contents are lists of parts."""
    _end_in_jobs(monkeypatch, signal.SIGKILL, 1)
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(HeadraceError, match="ended with"):
        template.render(messages)
    assert template.render(messages) == "hello"


def test_every_exit_status_of_the_template_process_is_described() -> None:
    """Python has no names for most signals of real time."""
    assert end_in_words(1) == "status 1"
    assert end_in_words(-9).startswith("signal 9 (Killed")
    assert all(end_in_words(-number) for number in range(1, signal.NSIG))


def test_texts_and_origins_pass_the_template_process_unchanged() -> None:
    """Lone surrogates, control characters and characters beyond 16 bits."""
    own = TemplateText('\ud83d\ude00\x00\n"é😀')
    outside = "\udc80 \x1b \u2028"
    prompt = render_template("{{ own }}{{ outside }}", {"own": own, "outside": outside})
    assert str.__str__(prompt) == str.__str__(own) + outside
    assert prompt.origin == "t" * len(own) + "o" * len(outside)


def test_the_time_is_of_the_zone_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    process = TemplateProcess()
    try:
        assert _render(process, "{{ strftime_now('%H %z') }}").split()[0] in _hours()
    finally:
        process.end()
        monkeypatch.undo()
        time.tzset()


def _hours() -> set[str]:
    """Return the hour now, and the one before."""
    now = datetime.now()
    return {f"{now.hour:02}", f"{(now.hour - 1) % 24:02}"}


def test_a_stopped_wait_ends_the_process(process: TemplateProcess) -> None:
    _render(process, "a")
    pid = _pid(process)
    with encoding_ends(lambda: True), pytest.raises(EncodingStoppedError):
        _render(process, ENDLESS)
    assert not psutil.pid_exists(pid)
    assert _render(process, "b") == "b"


def test_a_write_to_a_process_that_reads_nothing_can_be_stopped(process: TemplateProcess) -> None:
    _render(process, "a")
    os.kill(_pid(process), signal.SIGSTOP)
    with encoding_ends(lambda: True), pytest.raises(EncodingStoppedError):
        _render(process, "{{ x | length }}", x="x" * 1_000_000)
    assert _render(process, "b") == "b"


def test_each_thread_gets_its_own_answer(process: TemplateProcess) -> None:
    answers: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        answers[number] = [_render(process, "{{ x }}", x=number) for _ in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [str(number)] * 20 for number in range(4)}


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{", b"5", b"[" * 100_000, b'{"text": "a"}', b'{"text": "a", "origin": "tt"}',
     b'{"text": "a", "origin": "x"}', b'{"text": ["a"], "origin": ["t"]}',
     b'{"text": ["a"], "origin": "t"}'],
)  # fmt: skip
def test_an_answer_that_no_sound_process_sends_is_refused(answer: bytes) -> None:
    with pytest.raises(CheckpointError, match="no answer"):
        template_process._checked(_job("a", {}), answer)


def test_an_empty_error_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TemplateProcess, "answer", lambda _, job: template_process._checked(job, b'{"error": ""}'))
    with pytest.raises(CheckpointError):
        render_template("a", {})


@pytest.mark.parametrize(
    ("interpreter", "reason"),
    [
        ("/bin/false", "it ended with status 1"),
        ("/bin/echo", "it ended with"),  # it writes, but is not ready
        ("/nowhere/python", "No such file"),
    ],
)
def test_an_interpreter_that_cannot_run_is_named(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch, interpreter: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    with pytest.raises(HeadraceError, match=f"the process for chat templates cannot be started: .*{reason}") as caught:
        _render(process, "a")
    assert not isinstance(caught.value, CheckpointError)
    assert interpreter in str(caught.value.hint)


def test_a_module_that_cannot_be_imported_is_named(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('damaged')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HeadraceError, match="cannot be started: ImportError: damaged") as caught:
        _render(process, "a")
    assert not isinstance(caught.value, CheckpointError)
    monkeypatch.undo()
    assert _render(process, "a") == "a"


def test_the_exit_of_the_program_closes_no_pipe_that_a_thread_reads(process: TemplateProcess) -> None:
    _render(process, "a")
    assert process._worker is not None
    popen = process._worker.process
    assert popen.stdout is not None
    process._worker.kill()
    assert not psutil.pid_exists(popen.pid)
    assert popen.stdout.read() == b""  # a closed file raises ValueError


_EXIT = """
import atexit, threading, time
atexit.register(time.sleep, 0.5)  # the last handler: time for the thread to report an error
from headrace.models.text import template_process as it, worker
threading.Thread(target=it.render_template, args=("a", {}), daemon=True).start()
while not worker._workers:
    time.sleep(0.001)
"""


def test_a_thread_without_a_process_at_the_exit_of_the_program_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


_FORK = """
import os
from headrace.models.text import template_process as it
assert it.render_template("a", {}) == "a"
first = it._process._worker.process.pid
fork = os.fork()
if fork == 0:
    assert it._process._worker is None
    assert it.render_template("b", {}) == "b"
    os._exit(int(it._process._worker.process.pid == first))
assert os.waitpid(fork, 0)[1] == 0
assert it.render_template("c", {}) == "c"
assert it._process._worker.process.pid == first
"""


def test_a_fork_starts_a_process_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=PATIENCE_S)


_PARENT = """
import sys, time
from headrace.models.text import template_process as it
it.render_template("a", {})
print(it._process._worker.process.pid, flush=True)
time.sleep(600)
"""


def test_the_process_never_outlives_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert os.getpgid(child.pid) == child.pid  # Ctrl-C of the terminal does not reach it
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


_WITHOUT_RIGHTS = """
import os, socket, sys
from headrace.models.text.template_worker import give_up_rights
folder = sys.argv[1]
kept = os.open(folder + "/kept", os.O_WRONLY | os.O_CREAT)
give_up_rights()
assert os.getcwd() == "/"
def refused(call, *args):
    try:
        call(*args)
    except OSError:
        return True
assert refused(open, folder + "/new", "w")
assert refused(os.write, kept, b"x")
assert refused(open, folder + "/kept", "rb")
assert refused(socket.socket)
assert refused(os.pipe)
assert os.geteuid() == 0 or refused(os.fork)
"""


def test_a_process_without_rights_writes_no_file_and_starts_no_process(tmp_path: Path) -> None:
    """The limit on processes holds for ordinary users alone."""
    subprocess.run([sys.executable, "-c", _WITHOUT_RIGHTS, str(tmp_path)], check=True, timeout=PATIENCE_S)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "kept").read_bytes() == b""


def test_the_program_imports_no_jinja() -> None:
    code = (
        "import sys; from headrace.models.text.chat_template import ChatTemplate;"
        "ChatTemplate({'default': 'x'}).render([{'role': 'user', 'content': 'x'}]); assert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
