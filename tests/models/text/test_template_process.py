"""The process for chat templates: its start and end, the wait for it, and what it cannot do."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.models.text import template_process
from headrace.models.text.encoding import EncodingStoppedError, encoding_ends
from headrace.models.text.template_process import TemplateLimits, TemplateProcess, render_template, resident_bytes
from headrace.models.text.template_text import TemplateText
from headrace.runtime.errors import CheckpointError
from tests.support.patience import PATIENCE_S

LIMITS = TemplateLimits()
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def _pid(process: TemplateProcess) -> int:
    assert process._process is not None
    return process._process.pid


def _render(process: TemplateProcess, source: str, **variables: Any) -> str:
    return str(process.answer("render", source, variables, LIMITS)["text"])


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


def test_a_job_whose_process_is_killed_fails_by_name(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    write = template_process._write

    def write_and_kill(worker: "subprocess.Popen[bytes]", job: bytes) -> None:
        write(worker, job)
        worker.kill()

    monkeypatch.setattr(template_process, "_write", write_and_kill)
    with pytest.raises(CheckpointError, match="it ended its process with SIGKILL"):
        _render(process, ENDLESS)


def test_texts_and_origins_come_out_as_they_are() -> None:
    """Lone surrogates, control characters and characters beyond 16 bits."""
    own = TemplateText('\ud83d\ude00\x00\n"é😀')
    outside = "\udc80 \x1b \u2028"
    prompt = render_template("{{ own }}{{ outside }}", {"own": own, "outside": outside}, LIMITS)
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


def test_a_wait_for_another_thread_can_be_stopped(process: TemplateProcess) -> None:
    with process._lock, encoding_ends(lambda: True), pytest.raises(EncodingStoppedError):
        _render(process, "a")


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


def test_memory_is_watched_where_no_kernel_limits_it(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_LIMITS_ADDRESS_SPACE", False)
    source = "{% set x = 'a' * 600000000 %}" + ENDLESS
    with pytest.raises(CheckpointError, match="more than 256 MB"):
        process.answer("render", source, {}, TemplateLimits(seconds=5))
    assert resident_bytes(os.getpid()) > 10_000_000


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{", b"5", b"[" * 100_000, b'{"text": "a"}', b'{"text": "a", "origin": "tt"}',
     b'{"text": "a", "origin": "x"}', b'{"text": ["a"], "origin": ["t"]}'],
)  # fmt: skip
def test_an_answer_that_no_sound_process_sends_is_refused(answer: bytes) -> None:
    with pytest.raises(CheckpointError, match="no answer"):
        template_process._checked("render", answer)


def test_an_interpreter_that_cannot_run_is_named(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match="status 1"):
        _render(process, "a")


_PARENT = """
import sys, time
from headrace.models.text import template_process as it
it.render_template("a", {}, it.TemplateLimits())
print(it._process._process.pid, flush=True)
time.sleep(600)
"""


def test_the_process_never_outlives_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert os.getpgid(worker.pid) == worker.pid  # Ctrl-C of the terminal does not reach it
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
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
