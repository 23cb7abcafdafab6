"""One request with one seed has the same answer through run, batch, the Python API and the server, alone or not."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from headrace import load
from tests.support.commands import headrace
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import IM_END

PROMPT = "Where does the water come from?"
MESSAGES = [{"role": "user", "content": PROMPT}]
OPTIONS: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 60, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", ["", "reference"])
def test_the_same_request_has_the_same_answer_everywhere(
    model: Path, tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", kernels)
    bias = {str(IM_END): -100}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    run = headrace("run", PROMPT, "-m", model, *flags, f"--logit-bias={IM_END}=-100", "--json", home=tmp_path, code=0)
    texts = {"run": json.loads(run.stdout)["text"]}
    line = json.dumps({"messages": MESSAGES, **OPTIONS, "logit_bias": bias})
    batch = headrace("batch", "-m", model, stdin=line.encode(), home=tmp_path, code=0)
    texts["batch"] = json.loads(batch.stdout)["text"]
    with load(str(model)) as loaded:
        texts["api"] = loaded.generate(MESSAGES, **OPTIONS, logit_bias={IM_END: -100}).text
    with (
        ServerProcess(tmp_path, "-m", str(model), "-q") as server,
        httpx.Client(base_url=server.root, timeout=60) as http,
    ):

        def ask(**fields: Any) -> str:
            body = {"messages": MESSAGES, **OPTIONS, "logit_bias": bias, **fields}
            text: str = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            return text

        texts["server"] = ask()
        texts["server, its prompt cached"] = ask()
        with ThreadPoolExecutor(5) as threads:
            others = [threads.submit(ask, seed=seed, temperature=1.2) for seed in range(4)]
            texts["server, beside others"] = ask()
            assert len({other.result() for other in others}) == 4
    assert len(texts["run"]) > 10
    assert set(texts.values()) == {texts["run"]}, texts
