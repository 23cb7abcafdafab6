"""Ranks of tests: processes that run one model together, and rank 0's jobs, one JSON line each.

A job: model directory, split, prompts, and the environment in which all ranks load. Its answer: tokens and logits.
"""

import atexit
import functools
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.patience import PATIENCE_S

_FORKS = multiprocessing.get_context("fork")


def hostfile(path: Path, size: int) -> Path:
    """Write free ports of this machine as a hostfile of the ring."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    path.write_text(json.dumps([[f"127.0.0.1:{held.getsockname()[1]}"] for held in sockets]))
    for held in sockets:
        held.close()
    return path


@functools.cache
def build_waiting_ring() -> Path:
    """Compile the library with which ranks wait for each other without using a core."""
    folder = Path(tempfile.mkdtemp(prefix="waiting-ring-"))
    atexit.register(shutil.rmtree, folder)
    library = folder / "waiting_ring.so"
    source = Path(__file__).with_name("waiting_ring.cpp")
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


class Ranks:
    """Rank 0 of `size` ranks in a process of its own, which forks the others."""

    def __init__(self, folder: Path, size: int) -> None:
        environment = {**os.environ, "MLX_RANK": "0", "MLX_HOSTFILE": str(hostfile(folder / "hosts.json", size))}
        if sys.platform == "linux" and shutil.which("c++") is not None:
            environment["LD_PRELOAD"] = str(build_waiting_ring())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_process", str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "HEADRACE_THREADS": "1"},
            text=True,
        )
        assert self.process.stdout is not None
        self.pids: list[int] = json.loads(self.process.stdout.readline())

    def ask(self, **job: Any) -> Any:
        """Return rank 0's answer; of an error its class and message."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End all ranks."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


def answers(network: Any, limit: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of each prompt and their log probabilities, batch after batch."""
    from headrace.runtime.engine.engine import Engine
    from headrace.runtime.engine.request import Request, Step
    from headrace.runtime.sampling.params import SamplingParams
    from tests.support.speculating import Always

    engine = Engine(network, context_limit=limit, keep_prefix=True, max_running=8)
    if job.get("always"):  # draft tokens in every pass
        engine._drafting.controller = Always()
    weights = network.cost.weight_bytes
    found: dict[str, Any] = {"tokens": [], "logprobs": [], "drafted": 0, "weights": weights, "steps": []}
    found["fused"] = all(node is not None for _, node in getattr(network, "_layer_groups", ()))
    if job.get("dropped"):  # as after an error
        for first in (1, 4):
            engine.submit(Request([first, 2, 3] * 20, job["tokens"]))
        for _ in range(job["dropped"]):
            engine.step()
        engine.close()
    for batch in job["batches"]:
        sequences = []
        steps = dict[Any, list[Step]]()
        for number, prompt in enumerate(batch):
            how = SamplingParams(temperature=0.8, seed=number) if job.get("sampled") else SamplingParams(temperature=0)
            guesses = job.get("speculate", "off")
            sequences.append(engine.submit(Request(prompt, job["tokens"], how, speculate=guesses, logprobs=0)))
            for _ in range(job.get("apart", 0)):
                collect(engine, steps)
        while engine.has_work:
            collect(engine, steps)
        for own in (steps[sequence] for sequence in sequences):
            found["tokens"].append([token for step in own for token in step.tokens])
            found["logprobs"].append([each.chosen for step in own for each in step.logprobs or ()])
            found["drafted"] += sum(step.record.proposed for step in own)
            records = {(step.record.batch, step.record.weight_bytes // weights) for step in own}  # sequences, passes
            found["steps"].append(sorted(map(list, records)))
    return found


def heads(network: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of two answers whose draft tokens are often right, and the head's own first ones."""
    from tests.support.speculating import run_corrected

    sequences, corrected, _ = run_corrected(network, job["prompts"], job["wholes"])
    firsts = [sorted(proposer.firsts.items()) for proposer in corrected]
    return {"tokens": [sequence.tokens for sequence in sequences], "firsts": [list(map(list, own)) for own in firsts]}


def collect(engine: Any, steps: dict[Any, list[Any]]) -> None:
    """Run a step and append what sequences got."""
    from headrace.runtime.engine.request import Step

    for sequence, event in engine.step():
        if isinstance(event, Step):
            steps.setdefault(sequence, []).append(event)


def _lead(size: int) -> None:
    from headrace.models.loading import load
    from headrace.models.loading.ranked import load_ranked
    from headrace.models.registry.resolve import ResolvedModel
    from headrace.runtime.errors import HeadraceError
    from headrace.runtime.ops.kv_format import kv_format
    from headrace.runtime.ranks.leader import Leader, listen
    from headrace.runtime.ranks.split import Split

    listener = listen("127.0.0.1")
    key = secrets.token_bytes(32)
    address = listener.getsockname()[:2]
    # Forked after the imports, which take most of a start, and before anything is computed or has a thread.
    followers = [_FORKS.Process(target=_follow, args=(address, rank, key, listener)) for rank in range(1, size)]
    for follower in followers:
        follower.start()
    names = [f"host{rank}" for rank in range(size)]
    leader = Leader(listener, key, names, lambda error: print(json.dumps({"lost": str(error)}), flush=True))
    leader.accept(PATIENCE_S)
    print(json.dumps([os.getpid(), *(follower.pid for follower in followers)]), flush=True)
    torn = False
    for line in sys.stdin:
        job = json.loads(line)
        torn = torn or "torn" in job
        with patch.dict(os.environ, job.get("environment", {})), patch.object(load, "_tokenizer"):
            try:
                loaded = load_ranked(
                    ResolvedModel("tiny", Path(job["path"]), "a test"),
                    leader,
                    Split(job["kind"], tuple(job["shares"])),
                    model={"path": job["path"], "environment": job.get("environment", {})},
                    context=job.get("context", 256),
                    kv="auto" if job.get("kv") == "auto" else kv_format(job["kv"]) if "kv" in job else None,
                    activations=job.get("activations", 16),
                )
                if "wholes" in job:
                    answer = heads(loaded.network, job)
                else:
                    answer = answers(loaded.network, loaded.context_limit, job)
                if job.get("torn"):
                    _tear(loaded.network)
            except HeadraceError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
    leader.close()
    for follower in followers:
        if torn:  # it polls for the rest of a pass, until it takes rank 0 for lost
            follower.kill()
        follower.join(PATIENCE_S)


def _tear(network: Any) -> None:
    """Leave a pass before its logits, and go on."""
    from headrace.runtime.engine.engine import Engine
    from headrace.runtime.engine.request import Request

    engine = Engine(network, context_limit=64)
    engine.submit(Request([1, 2, 3], 9))
    with patch.object(network, "logits", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        while engine.has_work:
            engine.step()
    engine.submit(Request([1, 2, 3], 9))
    while engine.has_work:
        engine.step()


def _follow(address: tuple[str, int], rank: int, key: bytes, listener: socket.socket) -> None:
    """In a fork of rank 0."""
    from headrace.models.loading.ranked import serve_rank
    from headrace.runtime.ranks.follower import Follower

    listener.close()
    os.environ["MLX_RANK"] = str(rank)
    follower = Follower(address, rank, key, PATIENCE_S)

    def find(model: dict[str, Any]) -> Path:
        for name in ("HEADRACE_EXACT", "HEADRACE_KERNELS"):
            os.environ.pop(name, None)
        os.environ.update(model["environment"])
        return Path(model["path"])

    serve_rank(follower, find)


if __name__ == "__main__":
    _lead(int(sys.argv[1]))
