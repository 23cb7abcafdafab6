"""The default model, served: the answer of `headrace run`, in a stream."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.commands import headrace
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess

PROMPT = "Name three rivers."


@pytest.mark.real
def test_the_default_model_is_served(default_model: Path) -> None:
    home = default_model.parents[2]
    run = headrace("run", PROMPT, "-n", "24", "-t", "0", "--json", home=home, code=0)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
    with (
        ServerProcess(home, "-q") as server,
        httpx.stream(
            "POST", f"{server.root}/v1/chat/completions", json={**body, "stream": True}, timeout=PATIENCE_S
        ) as answer,
    ):
        # Other lines are blank, or comments that keep the connection open.
        data = [line for line in answer.iter_lines() if line.startswith("data: ")]
    *events, end = [line.removeprefix("data: ") for line in data]
    assert end == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == json.loads(run.stdout)["text"]
    assert len(text) > 10
