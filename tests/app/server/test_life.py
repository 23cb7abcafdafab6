"""A server's life: waiting requests, a full queue, the engine's death, unloading, signals."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.commands import headrace
from tests.support.patience import PATIENCE_S
from tests.support.processes import engines
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import IM_END

Starter = Callable[..., ServerProcess]
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS: dict[str, Any] = {"messages": HELLO, "temperature": 1, "logit_bias": {str(IM_END): -100}}


def post(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 3, **fields}
    return httpx.post(f"{server.root}/v1/chat/completions", json=body, timeout=PATIENCE_S)


class Streaming:
    """An endless answer, read on another thread."""

    def __init__(self, server: ServerProcess) -> None:
        self.lines: list[str] = []
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server,), daemon=True)
        self._thread.start()
        assert self._began.wait(PATIENCE_S)

    def _read(self, server: ServerProcess) -> None:
        url = f"{server.root}/v1/chat/completions"
        body = {**ENDLESS, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                if len(self.lines) > 2:
                    self._began.set()

    def error(self) -> dict[str, Any]:
        """Wait for the end, and return the error that it ended with."""
        self._thread.join(PATIENCE_S)
        assert self.lines[-1] == "data: [DONE]"
        found: dict[str, Any] = json.loads(self.lines[-2].removeprefix("data: "))["error"]
        return found


def test_a_full_queue_refuses_with_a_time(start: Starter) -> None:
    server = start("--parallel", "1", "--queue", "0")
    streaming = Streaming(server)
    refused = post(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["Retry-After"]) >= 1
    assert server.end(signal.SIGINT) == 130
    assert streaming.error()["code"] == "stopping"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_dead_engine_fails_its_requests_and_restarts(start: Starter, tmp_path: Path) -> None:
    server = start()
    streaming = Streaming(server)
    (engine,) = engines(tmp_path / "home")
    os.kill(engine, signal.SIGKILL)
    assert streaming.error()["code"] == "engine_died"
    assert post(server).status_code == 200  # waits for the new engine
    assert "engine" in server.errors
    assert str(tmp_path) not in server.errors


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_idle_model_is_unloaded_and_loaded_again(start: Starter, tmp_path: Path) -> None:
    server = start("--idle-unload", "1")
    server.until(engine="unloaded", status="ok")
    assert engines(tmp_path / "home") == []
    assert post(server).status_code == 200
    server.until(engine="unloaded")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_signals_end_an_idle_server(start: Starter, tmp_path: Path, number: signal.Signals) -> None:
    server = start()
    assert server.end(number) == 128 + number
    assert engines(tmp_path / "home") == []
    assert "Traceback" not in server.errors


def test_sigterm_lets_running_answers_end_within_the_grace_time(start: Starter) -> None:
    server = start("--grace", "0.5")
    streaming = Streaming(server)
    server.process.send_signal(signal.SIGTERM)
    assert streaming.error()["code"] == "stopping"
    assert server.process.wait(PATIENCE_S) == 143
    server = start("--grace", str(PATIENCE_S))
    with httpx.stream(
        "POST", f"{server.root}/v1/chat/completions", json={**ENDLESS, "stream": True, "max_tokens": 400},
        timeout=PATIENCE_S,
    ) as response:  # fmt: skip
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(PATIENCE_S) == 143


def test_a_request_before_the_model_is_loaded_is_answered(start: Starter) -> None:
    """The port is open while the model loads."""
    server = start("--port", "0", wait=False)
    server.await_line()
    assert post(server).status_code == 200


def test_a_model_that_cannot_be_served_is_a_one_line_error(tmp_path: Path) -> None:
    def served(*arguments: str) -> subprocess.CompletedProcess[str]:
        return headrace("serve", *arguments, home=tmp_path)

    missing = served("--port", "0", "-m", str(tmp_path / "nothing"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "nothing" in missing.stderr.splitlines()[-1]
    exposed = served("--host", "0.0.0.0")
    assert exposed.returncode == 2
    assert "HEADRACE_API_KEY" in exposed.stderr
    elsewhere = served("--host", "203.0.113.1", "--api-key", "k")
    assert elsewhere.returncode == 2
    assert "203.0.113.1" in elsewhere.stderr


def test_a_key_is_checked_and_never_shown(start: Starter) -> None:
    server = start(HEADRACE_API_KEY="s3cret-key")
    assert post(server).status_code == 401
    url = f"{server.root}/v1/models"
    assert httpx.get(url, headers={"Authorization": "Bearer s3cret-key"}).status_code == 200
    assert httpx.get(url, headers={"x-api-key": "s3cret-kex"}).status_code == 401
    assert server.health()["status"] == "ok"
    assert "s3cret" not in server.errors
