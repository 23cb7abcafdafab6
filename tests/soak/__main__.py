"""Soak test: python -m tests.soak --hours H.

An engine in this process answers batches; another one in a child process, as in the chat, answers turns, and its model
is changed now and then. After every round, when idle, memory, descriptors, threads and blocks of both processes are
read. Exits with 1 if one of them grows: the median of the last quarter above that of the second, by more than 1 % and
8 MB for memory, or by anything for the others. Prints progress every minute; Ctrl-C ends it with a report.

`--model NAME` also compares the predicted memory of a model with the memory used for a whole context.
"""

import argparse
import contextlib
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import mlx.core as mx
import psutil

from headrace.app.chat.conversation import Conversation
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.sessions.store import SessionStore
from headrace.models.loading.load import load_model
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.sampling.params import SamplingParams
from tests.soak.memory import predicted_memory
from tests.support.tiny_chat import IM_END, write_chat_model

Reading = dict[str, int]
_TURNS = 6  # in a round
_LEAST = 8  # rounds that say anything
_TOLD_S = 60.0
_LIFE = 8  # rounds between two switches of the chat's model


class Soak:
    """The long-lived parts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.choose = random.Random(seed)
        os.environ["HEADRACE_HOME"] = str(folder / "home")
        self._models = [write_chat_model(folder / name, seed=number) for number, name in enumerate("ab")]
        loaded = load_model(self._models[0], name="a", context=2048)
        self._engine = Engine(loaded.network, context_limit=2048, max_running=8)
        self._store = SessionStore(folder / "sessions.db")
        self._client = EngineClient()
        self._rounds = 0
        self.did = {"turns": 0, "requests": 0, "cancels": 0, "switches": 0}

    def round(self) -> Reading:
        """Run some turns and a batch, then read resources when idle."""
        if self._rounds % _LIFE == 0:
            self._client.start(ModelSpec(str(self._models[self._rounds // _LIFE % 2])))
            self.did["switches"] += 1
        self._rounds += 1
        self._talk()
        self._batch()
        return self._reading()

    def summary(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in self.did.items())

    def close(self) -> None:
        self._client.close()
        self._store.close()

    def _talk(self) -> None:
        sampling = {"temperature": 1.0, "max_tokens": 60, "logit_bias": {str(IM_END): -100}}
        chat = Conversation(self._client, self._store, self._store.create(sampling=sampling))
        for number in range(_TURNS):
            chat.send(f"turn {number} " + "why " * self.choose.randrange(40))
            stop = time.monotonic() + self.choose.uniform(0, 0.2) if self.choose.random() < 0.3 else None
            while chat.phase != "idle":
                chat.poll()
                if stop is not None and time.monotonic() > stop:
                    chat.stop()
                    self.did["cancels"] += 1
                    stop = None
                time.sleep(0.002)
            self.did["turns"] += 1
        session = chat.session.id
        chat.close()
        self._store.delete(session)

    def _batch(self) -> None:
        choose = self.choose
        requests = [
            Request(
                [choose.randrange(256) for _ in range(choose.choice((1, 30, 200)))],
                max_tokens=choose.randrange(1, 60),
                sampling=SamplingParams(temperature=choose.choice((0.0, 1.0)), seed=choose.randrange(99)),
            )
            for _ in range(24)
        ]
        running = [self._engine.submit(request) for request in requests]
        while self._engine.has_work:
            self._engine.step()
            if choose.random() < 0.02:
                choose.choice(requests).cancel.set()
                self.did["cancels"] += 1
            if choose.random() < 0.01:
                self._engine.cancel(choose.choice(running))
                self.did["cancels"] += 1
        self.did["requests"] += len(requests)

    def _reading(self) -> Reading:
        gc.collect()
        blocks = self._engine.load().blocks
        own = psutil.Process()
        child = psutil.Process(self._client.pid)
        return {
            "memory": own.memory_info().rss,
            "MLX memory": mx.get_active_memory(),
            "descriptors": own.num_fds(),
            "threads": own.num_threads(),
            "blocks held": blocks.used if blocks else 0,
            "objects": len(gc.get_objects()) // 1000,
            "engine memory": child.memory_info().rss,
            "engine descriptors": child.num_fds(),
            "engine threads": child.num_threads(),
        }


def grown(readings: list[Reading]) -> Iterator[str]:
    """Describe the growth."""
    quarter = len(readings) // 4
    for name in readings[0]:
        early = median(reading[name] for reading in readings[quarter : 2 * quarter])
        late = median(reading[name] for reading in readings[-quarter:])
        slack = early * 0.01 + (8 << 20) if "memory" in name else early * 0.01 + 1 if name == "objects" else 0
        if late > early + slack:
            yield f"{name} grew from {early:,.0f} to {late:,.0f}"


def _soak(soak: Soak, seconds: float) -> list[Reading]:
    """Run rounds for the given time, or until Ctrl-C."""
    readings: list[Reading] = []
    started = told = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        while (now := time.monotonic()) < started + seconds or len(readings) < _LEAST:
            readings.append(soak.round())
            if now > told + _TOLD_S:
                told = now
                print(f"{(now - started) / 60:.0f} of {seconds / 60:.0f} minutes: {soak.summary()}", file=sys.stderr)
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", metavar="NAME", help="compare predicted with actual memory of this model")
    parser.add_argument("--context", type=int, default=8192, help="for so many tokens")
    given = parser.parse_args()
    if given.model:
        predicted, actual = predicted_memory(given.model, given.context)
        told = f"{predicted / 1e6:.1f} MB predicted, {actual / 1e6:.1f} MB at the peak: {predicted / actual - 1:+.1%}"
        print(f"{given.model}: {told}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.seed)
        readings = _soak(soak, given.hours * 3600)
        soak.close()
    if len(readings) < _LEAST:
        print(f"stopped after {len(readings)} rounds: too few to tell")
        return 130
    print(f"{len(readings)} rounds:", soak.summary())
    for name in readings[0]:
        values = [reading[name] for reading in readings]
        told = {"first": values[0], "middle": median(values), "most": max(values), "last": values[-1]}
        print(f"{name:20}", " ".join(f"{word} {value:>13,.0f}" for word, value in told.items()))
    problems = list(grown(readings))
    print("\n".join(problems) or "nothing grew")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
