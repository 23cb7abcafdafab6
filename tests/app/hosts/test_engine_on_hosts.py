"""The chat's engine on two ranks: it answers, reports a lost rank by name, and goes on alone."""

import time
from pathlib import Path

import psutil
import pytest

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import HostsChoice, ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta, Died, Done, Event, Failed, Ready
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model

HELLO = [{"role": "user", "content": "hello"}]


def until(client: EngineClient, kind: type[Event]) -> Event:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for event in client.poll():
            if isinstance(event, kind):
                return event
            assert not isinstance(event, Died | Failed), event
        time.sleep(0.01)
    raise AssertionError(f"no {kind.__name__}")


def test_after_a_lost_rank_the_model_runs_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    model = write_chat_model(tmp_path / "tiny")
    client = EngineClient()
    try:
        client.start(ModelSpec(str(model), hosts=HostsChoice("localhost,localhost", "tensor")))
        ready = until(client, Ready)
        assert isinstance(ready, Ready)
        assert any("tensor parallel" in note for note in ready.card.notes)
        assert [line.partition(" (")[0] for line in ready.card.ranks] == ["rank 0", "rank 1"]
        assert "50 % of each layer, link" in ready.card.ranks[1]
        client.submit(Generate(1, HELLO, AnswerOptions(max_tokens=4, logit_bias={IM_END: -100})))
        until(client, Done)
        client.submit(Generate(2, HELLO, AnswerOptions(max_tokens=4000, logit_bias={IM_END: -100})))
        until(client, Delta)
        assert client.pid is not None
        [rank] = [p for p in psutil.Process(client.pid).children() if "headrace.app.hosts.rank" in p.cmdline()]
        rank.kill()
        died = until(client, Died)
        assert isinstance(died, Died)
        assert died.message.startswith("rank 1 (localhost)")
        client.restart()
        again = until(client, Ready)
        assert isinstance(again, Ready)
        assert not again.card.ranks
        client.submit(Generate(3, HELLO, AnswerOptions(max_tokens=4, logit_bias={IM_END: -100})))
        until(client, Done)
    finally:
        client.close()
