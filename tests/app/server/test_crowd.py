"""Many connections at once, some of which drop in the middle: nothing is left behind."""

import asyncio
import random
import time
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")


def body(path: str, chance: random.Random) -> dict[str, Any]:
    prompt = "x" * chance.randrange(400)
    options = {"temperature": 1, "seed": chance.randrange(100), "stream": chance.random() < 0.7}
    match path:
        case "/v1/responses":
            return {"input": prompt or "x", "max_output_tokens": 40, **options}
        case "/v1/completions":
            return {"prompt": prompt or "x", "max_tokens": 40, "n": chance.choice((1, 2)), **options}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 40, **options}


async def one(client: httpx.AsyncClient, chance: random.Random) -> int:
    """Make a request, and perhaps leave it in the middle; return its status, 0 if it was left."""
    path = chance.choice(PATHS)
    async with client.stream("POST", path, json=body(path, chance)) as response:
        drop = chance.random() < 0.25
        async for _ in response.aiter_raw():
            if drop:
                return 0
        return response.status_code


async def crowd(root: str, clients: int, seconds: float) -> list[int]:
    """Return the statuses of requests that so many clients make for a time, each one after the other."""
    end = time.monotonic() + seconds
    statuses: list[int] = []

    async def go_on(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            statuses.append(await one(client, chance))

    # One client for all: each makes a TLS context of its own, which takes longer than a request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=root, timeout=PATIENCE_S, limits=limits) as client:
        await asyncio.gather(*map(go_on, range(clients)))
    return statuses


def descriptors(server: ServerProcess) -> int:
    process = psutil.Process(server.process.pid)
    return sum(one.num_fds() for one in (process, *process.children()))


def figure(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.root}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


@pytest.mark.parametrize(("clients", "seconds"), [(30, 1.0), pytest.param(200, 60.0, marks=pytest.mark.nightly)])
def test_hundreds_of_clients_leak_no_sockets_tasks_or_blocks(
    server: ServerProcess, clients: int, seconds: float
) -> None:
    asyncio.run(crowd(server.root, 4, 0.3))
    server.until(requests=0)
    before = descriptors(server)
    tasks = figure(server, "headrace_tasks")
    statuses = asyncio.run(crowd(server.root, clients, seconds))
    server.until(requests=0)
    assert set(statuses) <= {0, 200, 429}
    assert 200 in statuses
    assert 0 in statuses
    assert figure(server, 'headrace_kv_blocks{state="used"}') == 0
    deadline = time.monotonic() + PATIENCE_S
    # The client's and the server's ends of its last connections; one task answers the question itself.
    while descriptors(server) > before + 2 or figure(server, "headrace_tasks") > tasks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Traceback" not in server.errors
