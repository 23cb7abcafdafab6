"""The server against the engine without HTTP: speed of one and of eight clients, first tokens, peers.

    python -m tests.bench.serve [--rounds 5] [--tokens 256] [--speculate off] [--agent 14000]
        [--llama-python PYTHON --gguf FILE] [--mlx-model DIR]

One streaming client against `headrace run` on the same prompt, eight at once against `headrace bench --batch 8`, in
pairs whose order alternates, so that each ratio is of neighbours in time. Draft tokens are off: a server has learned
from the answers before, and each prompt has its own acceptance. Clients measure with their own clock: time to the first
text, and tokens after it over the time between the first and the last; they keep bytes and times, and parse afterwards.
On Linux the CPU time per token of each process is shown, which other programs change less than the rates.

Peers: llama-cpp-python's server (`--llama-python`, `--gguf`) and mlx-lm's (`--mlx-model`), each in turn with this one,
on the same weights and as many threads.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import psutil

from tests.support.server_process import ServerProcess

TOPICS = ("rivers", "mills", "bridges", "clouds", "glass", "bread", "trains", "bees")
NO_END = {"2": -100}  # the default model's end of turn, so that every answer has its length
WAIT_S = 600.0
_SETTLE_S = 2.0  # for the idle work of a new server


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer, by its client's clock. began, ended: of its text."""

    sent: float
    began: float
    ended: float
    tokens: int
    cached: int

    @property
    def ttft_s(self) -> float:
        return self.began - self.sent

    @property
    def rate(self) -> float:
        return (self.tokens - 1) / (self.ended - self.began)


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int, **fields: Any) -> Reply:
    """Stream one answer. Its bytes are read as they come, and parsed at the end."""
    body = {
        "model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    sent = time.perf_counter()
    pieces = list[tuple[float, bytes]]()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for piece in response.aiter_raw():
            pieces.append((time.perf_counter(), piece))
    began = 0.0
    ended = 0.0
    usage = {}
    held = b""
    for at, piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for chunk in (json.loads(line[6:]) for line in lines if line.startswith(b"data: {")):
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                began = began or at
                ended = at
    count = usage.get("completion_tokens", tokens)
    return Reply(sent, began, ended, count, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def new_prompt(topic: str) -> str:
    """Return a prompt that has nothing in common with others."""
    return f"{random.random()}: Write a long essay about {topic}."


async def ask_all(root: str, clients: int, tokens: int, **fields: Any) -> list[Reply]:
    """Stream an answer to each of so many clients at once, to prompts that have nothing in common."""
    prompts = [new_prompt(topic) for topic in TOPICS[:clients]]
    return await ask_each(root, prompts, tokens, **fields)


async def ask_each(root: str, prompts: Sequence[str], tokens: int, **fields: Any) -> list[Reply]:
    """Stream an answer to each prompt at once."""
    async with httpx.AsyncClient(base_url=root, timeout=WAIT_S) as client:
        return list(await asyncio.gather(*(ask(client, prompt, tokens, **fields) for prompt in prompts)))


def together(replies: list[Reply]) -> float:
    """Return the tokens per second of all, from the moment all have begun until the first has ended."""
    begin = max(reply.began for reply in replies)
    end = min(reply.ended for reply in replies)
    return sum(reply.rate for reply in replies) if end > begin else 0.0


def run_alone(prompt: str, tokens: int, speculate: str) -> tuple[float, float]:
    """Return tokens per second and the time to the first text of `headrace run`."""
    command = [sys.executable, "-m", "headrace", "run", prompt, "-n", str(tokens), "-t", "0", "--json", "-q"]
    command += ["--logit-bias", "2=-100", "--speculate", speculate]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return document["decode_tokens_per_second"], document["ttft_s"]


def bench_batch(tokens: int, batch: int) -> float:
    """Return the tokens per second of a batch without HTTP."""
    command = [
        sys.executable,
        "-m",
        "headrace",
        "bench",
        "-p",
        "0",
        "-n",
        str(tokens),
        "--batch",
        str(batch),
        "-r",
        "1",
    ]
    document = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout)
    (found,) = (one for one in document["results"] if one["batch"] == batch)
    return float(found["tokens_per_second"]["mean"])


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server on the same weights. model: the name that its requests have. tokens: of an answer."""

    name: str
    command: tuple[str, ...]
    port: int
    model: str
    tokens: int

    @contextmanager
    def running(self, threads: int) -> Iterator[str]:
        """Run it; yield its URL once it answers."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        server = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        root = f"http://127.0.0.1:{self.port}"
        try:
            for _ in range(600):
                if server.poll() is not None:
                    raise RuntimeError(f"{self.name} ended with {server.returncode}")
                try:
                    httpx.get(f"{root}/v1/models").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield root
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def peers(arguments: argparse.Namespace, threads: int) -> Iterator[Peer]:
    """Yield the peers that were asked for."""
    if arguments.llama_python:
        command = (arguments.llama_python, "-m", "llama_cpp.server", "--model", str(arguments.gguf), "--port", "18181")
        command += ("--n_ctx", "16384", "--n_threads", str(threads), "--n_threads_batch", str(threads))
        command += ("--verbose", "false", "--interrupt_requests", "false")  # else each request ends the one before
        yield Peer("llama-cpp-python", command, 18181, "default", arguments.tokens)
    if arguments.mlx_model:
        command = (arguments.mlx_python, "-m", "mlx_lm", "server", "--model", str(arguments.mlx_model))
        command += ("--port", "18183", "--log-level", "ERROR")
        yield Peer("mlx-lm", command, 18183, "default_model", arguments.mlx_tokens)


def median(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


T = TypeVar("T")
Costs = dict[str, float]


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of all threads of a process; 0 where the system does not tell it exactly."""
    times = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in times) / 1e9


def costing(server: ServerProcess, tokens: int, work: Callable[[], T]) -> tuple[T, Costs]:
    """Return the result of `work`, and the CPU microseconds per token of each process in it."""
    http = psutil.Process(server.process.pid)
    named = {"HTTP": http, "engine": http.children()[0], "client": psutil.Process()}
    before = {name: cpu_seconds(process) for name, process in named.items()}
    result = work()
    return result, {name: (cpu_seconds(one) - before[name]) / tokens * 1e6 for name, one in named.items()}


def in_turns(number: int, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
    """Call both, in an order that alternates."""
    if number % 2:
        later = second()
        return first(), later
    return first(), second()


def compare_with_engine(server: ServerProcess, arguments: argparse.Namespace) -> None:
    """Print the server's ratios to the engine without HTTP."""
    rates = list[float]()
    later = list[float]()
    batches = list[float]()
    costs = list[list[Costs]]([[], []])
    tokens = arguments.tokens
    fields = {"logit_bias": NO_END, "speculate": arguments.speculate}
    for number in range(arguments.rounds):
        prompt = new_prompt(TOPICS[0])

        def one(prompt: str = prompt) -> tuple[float, float]:
            work = partial(asyncio.run, ask_each(server.root, [prompt], tokens, **fields))
            (reply,), cost = costing(server, tokens, work)
            costs[0].append(cost)
            return reply.rate, reply.ttft_s

        def eight() -> float:
            work = partial(asyncio.run, ask_all(server.root, 8, tokens, **fields))
            replies, cost = costing(server, 8 * tokens, work)
            costs[1].append(cost)
            return together(replies)

        (alone, ttft_s), (rate, first_s) = in_turns(
            number, partial(run_alone, prompt, tokens, arguments.speculate), one
        )
        rates.append(rate / alone)
        later.append((first_s - ttft_s) * 1e3)
        batch, all_s = in_turns(number, partial(bench_batch, tokens, 8), eight)
        batches.append(all_s / batch)
        print(f"  run {alone:.0f} tok/s, server {rate:.0f}; bench {batch:.0f}, 8 clients {all_s:.0f}", flush=True)
    print(f"one client over run, tok/s:    {median(rates)}")
    print(f"its first text later by, ms:   {median(later)}")
    print(f"8 clients over bench batch 8:  {median(batches)}")
    for clients, found in zip((1, 8), costs, strict=True):
        each = (f"{name} {statistics.median(cost[name] for cost in found):.0f}" for name in found[0])
        print(f"CPU us per token, {clients} clients: {', '.join(each)}")


def compare_with_peers(root: str, arguments: argparse.Namespace) -> None:
    """Print the server's ratios to the peers', all in turns, on as many threads."""
    threads = os.cpu_count() or 1
    print(f"threads: {threads} each; {threads} CPUs")
    with ExitStack() as stack:
        running = [(peer, stack.enter_context(peer.running(threads))) for peer in peers(arguments, threads)]
        for clients in (1, 8):
            ratios: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                for peer, url in running:
                    theirs = time_all(url, clients, peer.tokens, model=peer.model)
                    ours = time_all(root, clients, peer.tokens)
                    ratios.setdefault(peer.name, []).append(ours / theirs)
                    print(f"  {clients} clients: {ours:.1f} tok/s, {peer.name} {theirs:.1f}", flush=True)
            for name, found in ratios.items():
                print(f"over {name}'s server, {clients} clients: {median(found)}")


def time_all(root: str, clients: int, tokens: int, **fields: Any) -> float:
    """Return the tokens per second of all clients over the whole time, as a user has it."""
    started = time.perf_counter()
    replies = asyncio.run(ask_all(root, clients, tokens, logit_bias=NO_END, **fields))
    return sum(reply.tokens for reply in replies) / (time.perf_counter() - started)


def second_turn(root: str, tokens: int) -> None:
    """Print the time to the first token of an agent's long prompt, and of its second turn."""
    words = random.Random(1).choices(TOPICS, k=tokens // 7)  # about 7 tokens each
    prompt = " ".join(f"{word} {place}." for place, word in enumerate(words))

    async def turns() -> list[Reply]:
        async with httpx.AsyncClient(base_url=root, timeout=WAIT_S) as client:
            return [await ask(client, prompt + more, 8) for more in ("", " And then?")]

    first, second = asyncio.run(turns())
    print(f"long prompt: {first.ttft_s:.2f} s, second turn {second.ttft_s:.3f} s, {second.ttft_s / first.ttft_s:.1%}")
    print(f"  ({second.cached} tokens cached)")


def cold_start() -> None:
    """Print the time from the start of a server to the first token of a request that waits for it."""
    port = 18182
    started = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", str(port), "-q"], stdout=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                (reply,) = asyncio.run(ask_all(f"http://127.0.0.1:{port}", 1, 2))
                break
            except httpx.ConnectError:
                time.sleep(0.005)
        print(f"cold start to first token: {reply.began - started:.2f} s")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--speculate", default="off", help="of `run` and of the clients")
    parser.add_argument("--agent", type=int, default=0, help="tokens of the long prompt; 0: leave it out")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python and its server")
    parser.add_argument("--gguf", type=Path, help="the default model's file, for --llama-python")
    parser.add_argument("--mlx-model", type=Path, help="the default model's directory, for mlx-lm's server")
    parser.add_argument("--mlx-python", default=sys.executable, help="interpreter with mlx-lm")
    parser.add_argument("--mlx-tokens", type=int, default=16, help="of an answer beside mlx-lm, which is slow here")
    parser.add_argument("--peers-only", action="store_true")
    arguments = parser.parse_args()
    cold_start()
    home = os.environ.get("HEADRACE_HOME")
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(home or folder), "-q") as server:
        asyncio.run(ask_all(server.root, 1, 8))
        time.sleep(_SETTLE_S)
        if not arguments.peers_only:
            compare_with_engine(server, arguments)
        if arguments.agent:
            second_turn(server.root, arguments.agent)
        if arguments.llama_python or arguments.mlx_model:
            compare_with_peers(server.root, arguments)


if __name__ == "__main__":
    main()
