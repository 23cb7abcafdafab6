"""The server of docs/python.md: eight clients at once, one of which hangs up."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from headrace import load
from tests.support.pages import blocks
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model

TEXTS = [f"{word} " * 9 for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
LENGTH = 24
ENDLESS = 3500
# What the test asks beyond the page: the ends of all answers so far.
ENDS = """
from headrace import Model

chat, answers = Model.chat, []

def kept_chat(model, *args, **options):
    stream = chat(model, *args, **options)
    answers.append(stream._opened.answer)
    return stream

Model.chat = kept_chat

@app.get("/ends")
def ends() -> list[str]:
    return [answer.end.ended_by for answer in answers if answer.finished is not None]
"""


def test_eight_clients_are_answered_and_one_that_hangs_up_ends_its_answer(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    directory = write_chat_model(tmp_path / "tiny")
    code = blocks("docs/python.md", "python")[1]
    assert '"smollm2-135m"' in code
    (tmp_path / "service.py").write_text(code.replace('"smollm2-135m"', repr(str(directory))) + ENDS)
    with load(directory) as model:
        expected = [model.generate(text, max_tokens=LENGTH).text for text in TEXTS]
    arguments = [sys.executable, "-W", "ignore", "-m", "uvicorn", "--port=0", "--app-dir", str(tmp_path), "service:app"]
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "HEADRACE_HOME": str(tmp_path)}
    ) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
            client = httpx2.Client(base_url=address, timeout=PATIENCE_S)

            def streamed(text: str) -> str:
                return client.post("/stream", json={"text": text, "max_tokens": LENGTH}).raise_for_status().text

            def whole(text: str) -> str:
                found = client.post("/answer", json={"text": text, "max_tokens": LENGTH}).raise_for_status().json()
                return str(found["text"])

            with ThreadPoolExecutor(9) as threads, client:
                with client.stream("POST", "/stream", json={"text": "hi", "max_tokens": ENDLESS}) as endless:
                    parts = endless.iter_bytes()  # kept: dropping it would hang up
                    assert next(parts)
                    assert list(threads.map(streamed, TEXTS)) == expected
                    assert client.get("/ends").json() == ["max_tokens"] * len(TEXTS)  # the other one goes on
                end = time.monotonic() + PATIENCE_S
                while "cancelled" not in client.get("/ends").json():
                    assert time.monotonic() < end
                    time.sleep(0.01)
                assert list(threads.map(whole, TEXTS)) == expected
                refused = client.post("/answer", json={"text": "x" * 5000})
                assert (refused.status_code, "context limit" in refused.json()["error"]) == (400, True)
        finally:
            server.terminate()
            _, errors = server.communicate(timeout=PATIENCE_S)
    assert server.returncode in (0, -15)
    assert "Traceback" not in errors
