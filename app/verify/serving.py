"""Ways to serve the same requests: alone, together, joining and leaving, stepping back, in other chunks.

Each gives the traces of all sequences, in their order, and a line on what happened.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import replace
from typing import Any

from headrace.app.verify.trace import Trace
from headrace.runtime.cache import CHUNK
from headrace.runtime.engine import Engine
from headrace.runtime.network import Network
from headrace.runtime.pace import Pace
from headrace.runtime.request import Request
from headrace.runtime.sequence import Sequence

Served = tuple[list[Trace], str]
Tick = Callable[[], None]
"""Called between steps; may raise to end everything."""


class FixedPace(Pace):
    """Prompts in pieces of as many tokens as `draw` says, whatever the measured speed."""

    def __init__(self, draw: Callable[[], int]) -> None:
        super().__init__()
        self._draw = draw

    def budget(self, beside: bool) -> int:  # noqa: ARG002
        return self._draw()


class Serving:
    """One network and the requests to be answered by it, of at most `limit` entries each."""

    def __init__(self, network: Network[Any], requests: Row[Request], limit: int, tick: Tick) -> None:
        self.network = network
        self.requests = requests
        self.limit = limit
        self._tick = tick

    def one_by_one(self) -> Served:
        """As the chat and `run` ask: `generate`, each with an engine that serves nobody else."""
        traces = []
        for request in self.requests:
            engine = Engine(self.network, context_limit=self.limit)
            traces.append(Trace())
            for event in engine.generate(request):
                traces[-1].add(event)
                self._tick()
        return traces, ""

    def together(self, most: int, pace: Pace | None = None) -> Served:
        """All submitted at once, at most `most` of them served at a time: as some end, others join."""
        engine = Engine(self.network, context_limit=self.limit, most_running=most, pace=pace)
        sequences = [engine.submit(request) for request in self.requests]
        return self._drive(engine, sequences), ""

    def joining(self, most: int, seed: int) -> Served:
        """Submitted at any time; a third ends early, a third is cancelled. What there is of those is to be compared."""
        draw = random.Random(seed)
        engine = Engine(self.network, context_limit=self.limit, most_running=most)
        traces = [Trace() for _ in self.requests]
        fates = [number % 3 for number in range(len(traces))]  # 0: as it is, 1: ends early, 2: is cancelled
        draw.shuffle(fates)
        to_come = list(range(len(traces)))
        draw.shuffle(to_come)
        numbers: dict[Sequence, int] = {}
        while to_come or engine.has_work:
            if to_come and (draw.random() < 0.3 or not engine.has_work):
                number = to_come.pop()
                request = self.requests[number]
                assert request.max_tokens is not None
                if fates[number] == 1:
                    request = replace(request, max_tokens=draw.randrange(1, request.max_tokens + 1))
                numbers[engine.submit(request)] = number
            for sequence, event in engine.step():
                traces[numbers[sequence]].add(event)
            for sequence, number in numbers.items():
                if fates[number] == 2 and sequence.state != "finished" and draw.random() < 0.04:
                    engine.cancel(sequence)
            self._tick()
        return traces, f"{fates.count(1)} ended early, {fates.count(2)} to be cancelled at any step"

    def stepping_back(self, most: int) -> Served:
        """With memory for too few, so that the youngest step back and are fed again what they had.

        Prompts end a little before a piece of memory does. Half of them are let in, with room for all but one to grow,
        and are read in one pass, so that all want to at about the same time.
        """
        at_once = FixedPace(lambda: len(self.requests) * CHUNK)
        pieces = 2 * (len(self.requests) // 2) - 1
        memory = max(self.network.cost.kv_bytes(pieces * CHUNK), self.network.cost.kv_bytes(self.limit))
        engine = Engine(self.network, context_limit=self.limit, most_running=most, kv_memory=memory, pace=at_once)
        sequences = [engine.submit(request) for request in self.requests]
        times, before = 0, set[Sequence]()

        def watch() -> None:
            nonlocal times, before
            now = {sequence for sequence in sequences if sequence.state == "preempted"}
            times += len(now - before)
            before = now

        traces = self._drive(engine, sequences, watch)
        return traces, f"stepped back {times} times" if times else "nobody had to step back"

    def sharing(self, prompt: Row[int]) -> Served:
        """After another request that begins with `prompt`: as turns of a chat, then side by side."""
        engine = Engine(self.network, context_limit=self.limit, keep_prefix=True)
        turns: list[Trace] = []
        for request in [replace(self.requests[0], prompt=[*prompt, 0]), *self.requests]:
            turns.append(Trace())
            for event in engine.generate(request):
                turns[-1].add(event)
                self._tick()
        sequences = [engine.submit(request) for request in self.requests]
        traces = self._drive(engine, sequences)
        reused = sum(sequence.reused for sequence in sequences)
        return [*turns[1:], *traces], f"{reused} prompt tokens of those side by side were there already"

    def _drive(self, engine: Engine, sequences: Row[Sequence], between: Tick = lambda: None) -> list[Trace]:
        traces = {sequence: Trace() for sequence in sequences}
        while engine.has_work:
            for sequence, event in engine.step():
                traces[sequence].add(event)
            between()
            self._tick()
        return list(traces.values())
