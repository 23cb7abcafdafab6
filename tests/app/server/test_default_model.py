"""The default model, served: the answer of `headrace run`, in a stream."""

import json
from pathlib import Path

import pytest

from tests.support.commands import headrace
from tests.support.server_process import ServerProcess

PROMPT = "Name three rivers."


@pytest.mark.real
def test_the_default_model_is_served(default_model: Path) -> None:
    import openai

    home = default_model.parents[2]
    run = headrace("run", PROMPT, "-n", "24", "-t", "0", "--json", home=home, code=0)
    with (
        ServerProcess(home, "-q") as server,
        openai.OpenAI(base_url=f"{server.root}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == json.loads(run.stdout)["text"]
    assert len(text) > 10
