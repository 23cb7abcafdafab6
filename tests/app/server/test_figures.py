"""`/metrics` and `/v1/telemetry`: figures of what was answered, and no text."""

import json
import time
from typing import Any

import httpx2 as httpx

from headrace.app.engine.events import Delta, Done, Event, Ready
from headrace.app.engine.http_address import HTTPAddress
from headrace.app.engine.telemetry_reader import TelemetryReader
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess

SECRET = "a phrase that nobody else says"


def ask(client: httpx.Client, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 30, "temperature": 0, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    return response.json()


def samples(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    assert SECRET not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_answers(client: httpx.Client) -> None:
    assert "_created" not in client.get("/metrics").text
    before = samples(client)
    usage = ask(client)["usage"]
    after = samples(client)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('headrace_tokens_total{kind="prompt"}') == usage["prompt_tokens"]
    assert grown('headrace_tokens_total{kind="output"}') == usage["completion_tokens"]
    assert grown('headrace_requests_total{path="/v1/chat/completions",status="200"}') == 1
    assert grown("headrace_ttft_seconds_count") == grown("headrace_queue_seconds_count") == 1
    assert grown("headrace_itl_seconds_count") >= usage["completion_tokens"] - 1
    assert after["headrace_model_loaded"] == 1
    assert after['headrace_kv_bytes{kind="budget"}'] > 0


def test_telemetry_has_every_step_and_no_text(client: httpx.Client, server: ServerProcess) -> None:
    with httpx.stream("GET", f"{server.root}/v1/telemetry", timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: model"
        usage = ask(client)["usage"]
        names = []
        steps = []
        for line in lines:
            assert SECRET not in line
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: ") and names[-1:] == ["steps"]:
                steps += json.loads(line.removeprefix("data: "))["steps"]
            elif line.startswith("data: ") and names[-1:] == ["done"]:
                summary = json.loads(line.removeprefix("data: "))["summary"]
                break
    assert [step["index"] for step in steps] == list(range(summary["steps"]))
    assert summary["completion_tokens"] == usage["completion_tokens"]
    assert "load" in names


def test_the_telemetry_reader_receives_all_events(client: httpx.Client, server: ServerProcess) -> None:
    reader = TelemetryReader(HTTPAddress(server.root))
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while not any(isinstance(event, Ready) for event in events):
        events += reader.poll()
        assert time.monotonic() < deadline, reader.problem
        time.sleep(0.01)
    ask(client)
    while not any(isinstance(event, Done) for event in events):
        events += reader.poll()
        assert time.monotonic() < deadline, reader.problem
        time.sleep(0.01)
    reader.close()
    (ready,) = (event for event in events if isinstance(event, Ready))
    assert (ready.card.name, ready.card.context_limit) == ("tiny", 200_000)
    (done,) = (event for event in events if isinstance(event, Done))
    steps = [step for event in events if isinstance(event, Delta) for step in event.records]
    assert len(steps) == done.end.summary.steps
