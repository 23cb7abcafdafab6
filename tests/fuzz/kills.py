"""Random kills: python -m tests.fuzz.kills KIND --times N.

Sends SIGKILL at random moments to a writer of sessions, a whole chat, its engine, a batch, a download or one of two
ranks, and checks the remaining files: everything is readable, and nothing finished is lost or doubled. The expected
state comes from outside the program: engine output (`tests.faults.trace`), the results of an undisturbed batch, the
files of a hub. Ranks all end, and the lost one is named.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.models.registry.store import Store
from tests.faults.test_kills import kill_engines
from tests.faults.test_ui_kills import kill_chats
from tests.faults.trace import trace_engines
from tests.faults.writer_kills import kill_writers
from tests.fuzz.forked import ForkedChat, run
from tests.support.checkpoints import shard, tensor
from tests.support.hub_server import HubServer
from tests.support.killed_hosts import kill_ranks
from tests.support.tiny_chat import IM_END, write_chat_model

LINES = 40  # of a batch


def writers(folder: Path, times: int, seed: int) -> str:
    promises, answers = kill_writers(folder / "sessions.db", times, seed)
    return f"{promises} promises, {answers} answers"


def chats(folder: Path, times: int, seed: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        trace_engines(patch)
        asked, cut_short = kill_chats(folder, times, seed, ForkedChat)
    return f"{asked} questions, {cut_short} answers cut short"


def engines(folder: Path, times: int, seed: int) -> str:
    model = write_chat_model(folder / "model", context=1_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        trace_engines(patch)
        died, begun = kill_engines(folder, model, times, seed)
    return f"{died} answers died, of {begun} there was a beginning"


def batches(folder: Path, times: int, seed: int) -> str:
    """Continue each batch until it is complete; its results equal those of an undisturbed one."""
    choose = random.Random(seed)
    model = write_chat_model(folder / "model")
    source = folder / "in.jsonl"
    expected = folder / "expected.jsonl"
    out = folder / "out.jsonl"
    asked = [
        {"id": f"q{i}", "prompt": f"question {i}", "max_tokens": 1 + i % 30, "seed": i, "temperature": float(i % 2)}
        for i in range(LINES)
    ]
    source.write_text("".join(json.dumps({**line, "logit_bias": {str(IM_END): -100}}) + "\n" for line in asked))
    command = ["batch", str(source), "-m", str(model), "--parallel", "4", "-q", "-o"]
    errors = folder / "errors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder))
        takes = _undisturbed([*command, str(expected)], errors)
    answers = _texts(expected)
    assert len(answers) == LINES
    kills = whole = torn = 0
    while kills < times:
        before = _texts(out) if out.exists() else {}
        options = ["--in-order"] if choose.random() < 0.5 else []
        started = time.monotonic()
        killed = run([*command, str(out), *options], errors, choose.uniform(0.3, 1.1) * takes)
        kills += killed
        if not (killed or before):  # the first time, the machine may have had other work
            takes = min(takes, time.monotonic() - started)
        content = out.read_bytes() if out.exists() else b""
        torn += not content.endswith(b"\n") and bool(content)
        after = _texts(out) if out.exists() else {}
        assert before.items() <= after.items(), "a result is gone, or another one"
        assert after.items() <= answers.items(), "a result is not that of its request"
        assert killed or len(after) == LINES
        if len(after) == LINES:
            whole += 1
            out.unlink()
        assert not [path for path in folder.glob(".out.jsonl.*") if not killed], "a half-written file was left"
    return f"{whole} batches whole after all, {torn} lines torn"


def _texts(path: Path) -> dict[str, str]:
    """Return answers by name; incomplete lines do not count, duplicate names are an error."""
    found: dict[str, str] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            result = json.loads(line)
            assert result["error"] is None
            assert result["id"] not in found, "an answer is there twice"
            found[result["id"]] = result["text"]
    return found


def downloads(folder: Path, times: int, seed: int) -> str:
    """Pull models from a slow hub until complete: every byte equals the hub's; before that there is no model."""
    choose = random.Random(seed)
    files = write_chat_model(folder / "model")
    content = {path.name: path.read_bytes() for path in files.iterdir()}
    content["model-extra.safetensors"] = shard({"extra": tensor("U8", [1_000_000], 0)}, 1_000_000)
    kills = whole = resumed = 0
    resumes = False
    with HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        hub.add("org/name", content)
        hub.pace_s = 0.02
        home = folder / "home"
        cache = folder / "cache"
        errors = folder / "errors"
        hubs = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
        for name, value in {**hubs, "HEADRACE_HOME": str(home)}.items():
            patch.setenv(name, value)
        takes = _undisturbed(["models", "pull", "org/name"], errors)
        _remove(cache, home)
        while kills < times:
            started = time.monotonic()
            killed = run(["models", "pull", "org/name"], errors, choose.uniform(0.0, 1.1) * takes)
            kills += killed
            if not (killed or resumes):
                takes = min(takes, time.monotonic() - started)
            resumes = killed
            for blob in cache.rglob("snapshots/*/*"):
                assert blob.read_bytes() == content[blob.name], f"{blob.name} is there and is not whole"
            resumed += killed and any(cache.rglob("*.incomplete"))
            store = Store(home / "data" / "models")
            stored = [store.get(name) for name in store.names()]
            for model in filter(None, stored):
                assert {
                    path.name: path.read_bytes() for path in model.path.iterdir() if path.name in content
                } == content
            if not killed:
                run(["models", "verify"], errors)
                assert store.names() == ["org--name"]
                whole += 1
                _remove(cache, home)
    return f"{whole} models whole after all, {resumed} kills left the beginning of a file"


def _undisturbed(command: list[str], errors: Path) -> float:
    """Return the seconds of a run in a warm fork."""
    run(["--version"], errors)
    started = time.monotonic()
    run(command, errors)
    return time.monotonic() - started


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


KINDS: dict[str, Callable[[Path, int, int], str]] = {
    "writer": writers, "chat": chats, "engine": engines, "batch": batches, "download": downloads,
    "hosts": kill_ranks,
}  # fmt: skip


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        said = KINDS[given.kind](Path(folder), given.times, given.seed)
    print(f"{given.kind}: {given.times} kills, {said}; nothing lost, doubled or unreadable")


if __name__ == "__main__":
    main()
