"""Several models in one server: by name, at once, within the memory, and what happens when one cannot be loaded."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.http_address import HTTPAddress
from headrace.app.engine.remote import RemoteEngine
from headrace.app.engine.telemetry_reader import TelemetryReader, wait_for_model
from headrace.models.registry.store import Store
from tests.support.adapters import write_adapter
from tests.support.ollama import add_to_ollama
from tests.support.patience import PATIENCE_S
from tests.support.processes import engines
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import IM_END, write_chat_model

Starter = Callable[..., ServerProcess]
HELLO: Any = [{"role": "user", "content": "hello"}]
ENDLESS: Any = {"temperature": 1, "logit_bias": {str(IM_END): -100}}
LONG = 1_000_000_000  # tokens of a context that takes all memory: such models are not loaded together


def install(home: Path, name: str, **overrides: Any) -> None:
    """Install a tiny model under a name."""

    def build(directory: Path) -> dict[str, Any]:
        made = write_chat_model(directory / "made", **overrides)
        for file in made.iterdir():
            file.rename(directory / file.name)
        made.rmdir()
        return {"id": name}

    Store(home / "data" / "models").install(name.replace("/", "--"), build)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    install(home, "lake", seed=1)
    install(home, "org/river", seed=2)
    return home


def ask(server: ServerProcess, model: str, status: int = 200, **fields: Any) -> Any:
    """Return the completion of a chat, or the error that comes with another status."""
    body = {"model": model, "messages": HELLO, "max_tokens": 4, **fields}
    answer = httpx.post(f"{server.root}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def states(server: ServerProcess) -> dict[str, str]:
    """Return the state of every model."""
    found = httpx.get(f"{server.root}/v1/models", timeout=PATIENCE_S).json()["data"]
    return {model["id"]: model["status"]["value"] for model in found}


def until(server: ServerProcess, **wanted: str) -> None:
    """Wait until models have these states."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted.items() <= (found := states(server)).items():
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.usefixtures("home")
def test_a_request_loads_the_model_that_it_names(start: Starter) -> None:
    server = start()
    assert states(server) == {"tiny": "loaded", "lake": "unloaded", "org/river": "unloaded"}
    for asked, name in [("lake", "lake"), ("org--river", "org/river"), ("Lake", "lake"), ("default", "tiny")]:
        assert ask(server, asked)["model"] == name
    assert set(states(server).values()) == {"loaded"}
    assert server.health()["models_loaded"] == 3
    assert "lake" in ask(server, "sea", status=404)["error"]["message"]
    shown = httpx.get(f"{server.root}/v1/models/lake", timeout=PATIENCE_S).json()
    assert shown["context_length"] == 4096


@pytest.mark.usefixtures("home")
def test_models_that_are_not_listed_are_not_served(start: Starter) -> None:
    server = start("--models", "lake")
    assert list(states(server)) == ["tiny", "lake"]
    assert ask(server, "lake")["model"] == "lake"
    ask(server, "org/river", status=404)


def test_a_model_with_an_adapter_is_a_separate_model(home: Path, tmp_path: Path) -> None:
    base = Store(home / "data" / "models").get("lake")
    assert base is not None
    write_adapter(tmp_path / "lora", base.path, size=1.0)
    with ServerProcess(home, "--models", f"lake,lake+{tmp_path / 'lora'}") as server:
        answers = {name: ask(server, name, temperature=0) for name in ("lake", "lake+lora")}
    assert {name: answer["model"] for name, answer in answers.items()} == {"lake": "lake", "lake+lora": "lake+lora"}
    assert text_of(answers["lake"]) != text_of(answers["lake+lora"])


@pytest.mark.parametrize("folder", ["./", ""])
def test_models_with_adapters_are_named_as_in_other_servers(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Requests write BASE:ADAPTER or BASE+ADAPTER, without folders, where the command line has paths."""
    monkeypatch.chdir(tmp_path)
    base = write_chat_model(tmp_path / "base", seed=3)
    write_adapter(tmp_path / "pefta", base, size=1.0)
    with ServerProcess(home, "--models", f"{folder}base,{folder}base+./pefta") as server:
        assert list(states(server)) == ["base", f"{folder}base+pefta"]
        plain = {text_of(ask(server, name, temperature=0)) for name in ("base", f"{folder}base", "BASE")}
        names = ("base:pefta", "base+pefta", f"{folder}base:pefta", f"{folder}base+./pefta")
        adapted = {text_of(ask(server, name, temperature=0)) for name in names}
        assert len(plain) == len(adapted) == 1
        assert plain != adapted
        assert server.health()["models_loaded"] == 2
        for name in ("base:lora", "pefta", "base:", ":pefta", str(base)):
            ask(server, name, status=404)
    with ServerProcess(home, "-m", f"{folder}base+./pefta") as server:
        assert text_of(ask(server, "base:pefta", temperature=0)) in adapted


def test_a_model_of_ollama_is_served_with_its_adapter(home: Path, tmp_path: Path) -> None:
    add_to_ollama(tmp_path, "registry.ollama.ai/library/tuned/latest", adapters=1)
    add_to_ollama(tmp_path, "registry.ollama.ai/library/plain/latest")
    stored = {"HOME": str(tmp_path), "OLLAMA_MODELS": str(tmp_path / ".ollama" / "models")}
    with ServerProcess(home, "--models", "lake,tuned,plain", **stored) as server:
        answers = {name: ask(server, name, temperature=0, max_tokens=8) for name in ("tuned", "plain")}
        assert set(states(server)) == {"lake", "tuned", "plain"}
    assert [answer["model"] for answer in answers.values()] == ["tuned", "plain"]
    assert text_of(answers["tuned"]) != text_of(answers["plain"])


def test_the_first_of_the_listed_models_is_loaded_at_the_start(home: Path) -> None:
    with ServerProcess(home, "--models", "org/river,lake") as server:
        assert server.name == "org/river"
        assert states(server) == {"org/river": "loaded", "lake": "unloaded"}


@pytest.mark.usefixtures("home")
def test_models_that_are_asked_for_at_once_are_all_answered(start: Starter) -> None:
    server = start()
    names = ["lake", "org/river", "tiny", "lake", "org/river"]
    with ThreadPoolExecutor(len(names)) as threads:
        assert [answer["model"] for answer in threads.map(lambda name: ask(server, name), names)] == names


def test_models_that_do_not_fit_together_take_turns(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for seed, name in enumerate(["lake", "river"]):
        install(home, name, context=LONG, seed=seed)
    with ServerProcess(home, "-m", "lake") as server:
        assert ask(server, "river")["model"] == "river"
        assert states(server) == {"lake": "unloaded", "river": "loaded"}
        assert ask(server, "")["model"] == "lake"
        assert states(server) == {"lake": "loaded", "river": "unloaded"}
        names = ["lake", "river"] * 3
        with ThreadPoolExecutor(len(names)) as threads:
            assert [answer["model"] for answer in threads.map(lambda name: ask(server, name), names)] == names
        assert server.health()["models_loaded"] == 1
        if sys.platform == "linux":
            assert len(engines(home)) == 1


def test_a_model_is_not_unloaded_while_it_answers(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for seed, name in enumerate(["lake", "river"]):
        install(home, name, context=LONG, seed=seed)
    with ServerProcess(home, "-m", "lake") as server, ThreadPoolExecutor(2) as threads:
        running = threads.submit(ask, server, "lake", max_tokens=800, **ENDLESS)
        server.until(requests=1)
        other = send(server, "river")
        assert server.health()["requests"] == 1  # the answer still runs; who waits for memory is not counted
        again = threads.submit(ask, server, "lake")
        assert running.result()["usage"]["completion_tokens"] == 800
        assert json.load(other.getresponse())["model"] == "river"
        assert again.result()["model"] == "lake"
        other.close()


def test_the_least_recently_used_model_is_unloaded(tmp_path: Path) -> None:
    """Two small models fit; the large one needs all memory."""
    home = tmp_path / "home"
    for seed, name in enumerate(["lake", "river"]):
        install(home, name, seed=seed)
    install(home, "sea", context=LONG)
    with ServerProcess(home, "-m", "lake") as server:
        ask(server, "river")
        assert states(server) == {"lake": "loaded", "river": "loaded", "sea": "unloaded"}
        ask(server, "sea")
        assert states(server) == {"lake": "unloaded", "river": "unloaded", "sea": "loaded"}


def test_a_loaded_model_answers_while_another_loads(home: Path, start: Starter) -> None:
    server = start()
    assert ask(server, "tiny")["model"] == "tiny"
    loaded = set(engines(home))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ask, server, "lake")
        end = time.monotonic() + PATIENCE_S
        while not (loading := set(engines(home)) - loaded):
            assert time.monotonic() < end
            time.sleep(0.001)
        for engine in loading:
            os.kill(engine, signal.SIGSTOP)  # the load lasts until the other model has answered
        try:
            assert ask(server, "tiny")["model"] == "tiny"
            assert not other.done()
        finally:
            for engine in loading:
                os.kill(engine, signal.SIGCONT)
        assert other.result()["model"] == "lake"


def test_a_model_that_cannot_be_loaded_is_one_error(home: Path, start: Starter, tmp_path: Path) -> None:
    broken = home / "data" / "models" / "lake" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    server = start()
    for _ in range(2):
        error = ask(server, "lake", status=503)["error"]
        assert error["code"] == "model_not_loaded"
        assert "lake" in error["message"]
        assert str(tmp_path) not in error["message"]
    assert ask(server, "tiny")["model"] == "tiny"
    assert ask(server, "org/river")["model"] == "org/river"
    assert server.health()["status"] == "ok"
    assert states(server)["lake"] == "failed"
    assert "lake" in server.errors


def send(server: ServerProcess, model: str) -> HTTPConnection:
    """Send a request, and return its connection before the answer comes."""
    connection = HTTPConnection(server.root.removeprefix("http://"), timeout=PATIENCE_S)
    body = json.dumps({"model": model, "messages": HELLO, "max_tokens": 4})
    connection.request("POST", "/v1/chat/completions", body)
    return connection


@pytest.mark.usefixtures("home")
def test_a_load_continues_when_its_client_leaves(start: Starter) -> None:
    server = start(PYTHONHASHSEED="0")  # an engine in an interpreter of its own: its load takes long enough to be seen
    connection = send(server, "lake")
    until(server, lake="loading")
    connection.close()
    until(server, lake="loaded")
    assert ask(server, "lake")["model"] == "lake"
    server.until(requests=0)


def test_a_wait_for_memory_ends_with_its_client(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for seed, name in enumerate(["lake", "river"]):
        install(home, name, context=LONG, seed=seed)
    with ServerProcess(home, "-m", "lake") as server:
        url = f"{server.root}/v1/chat/completions"
        body = {"messages": HELLO, "stream": True, **ENDLESS}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as running:
            lines = running.iter_lines()
            next(lines)
            connection = send(server, "river")
            time.sleep(0.5)
            connection.close()
            assert ask(server, "lake")["model"] == "lake"  # nobody waits for the other model: this one stays
            assert states(server) == {"lake": "loaded", "river": "unloaded"}
            next(lines)


@pytest.mark.usefixtures("home")
def test_each_idle_model_is_unloaded(start: Starter) -> None:
    server = start("--idle-unload", "1")
    assert ask(server, "lake")["model"] == "lake"
    until(server, lake="unloaded", tiny="unloaded")
    assert ask(server, "lake")["model"] == "lake"
    assert states(server)["tiny"] == "unloaded"


@pytest.mark.usefixtures("home")
def test_telemetry_is_that_of_the_requested_model(start: Starter) -> None:
    server = start()
    ask(server, "lake")
    for name, model in [("tiny", None), ("lake", "lake"), ("org/river", "org/river")]:
        reader = TelemetryReader(HTTPAddress(server.root), model)
        if model == "org/river":
            assert wait_for_model(reader, 0.3) == []  # watching loads no model
            ask(server, model)
        found = wait_for_model(reader, PATIENCE_S)
        reader.close()
        assert found[0].card.name == name  # type: ignore[union-attr]
    text = httpx.get(f"{server.root}/metrics", timeout=PATIENCE_S).text
    assert "headrace_models_loaded 3.0" in text
    assert 'headrace_answers_total{reason="length"} 2.0' in text


@pytest.mark.usefixtures("home")
def test_a_chat_connects_to_a_model_that_is_not_loaded(start: Starter) -> None:
    server = start()
    engine = RemoteEngine(HTTPAddress(server.root), "org/river")
    engine.start(ModelSpec())
    deadline = time.monotonic() + PATIENCE_S
    while engine.state == "loading":
        engine.poll()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert engine.card is not None
    assert (engine.card.name, engine.card.context_limit) == ("org/river", 4096)
    assert states(server) == {"tiny": "loaded", "lake": "unloaded", "org/river": "loaded"}
    engine.close()
