"""Ways to serve the same requests: alone, batched, joining, preempted, in other chunks, from disk.

Each way returns `Served`, and `checks.py` compares its traces.

Guard: tests/app/verify/test_verify.py.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from headrace.app.verify.trace import Trace
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prompt_chunks import ChunkBudget
from headrace.runtime.engine.request import Request
from headrace.runtime.engine.sequence import Sequence as EngineSequence
from headrace.runtime.kv.cache import CHUNK
from headrace.runtime.kv.disk import DiskStore, load_blocks, store_blocks
from headrace.runtime.network import Network

Served = tuple[list[Trace], str]
"""Traces in the order of the requests, and a remark for the report."""
Tick = Callable[[], None]
"""Called between steps; may raise to stop."""


class FixedPace(ChunkBudget):
    """A chunk budget drawn by `draw`, independent of measured speed."""

    def __init__(self, draw: Callable[[], int]) -> None:
        super().__init__()
        self._draw = draw

    def budget(self, decoding: bool) -> int:  # noqa: ARG002
        return self._draw()


class Serving:
    """One network and the requests to serve, each of at most `limit` cache entries."""

    def __init__(self, network: Network, requests: Sequence[Request], limit: int, tick: Tick) -> None:
        self.network = network
        self.requests = requests
        self.limit = limit
        self._tick = tick

    @property
    def in_blocks(self) -> bool:
        """True if K/V are paged, and so can go to disk."""
        return Engine(self.network, context_limit=self.limit).kv.pool is not None

    def one_by_one(self) -> Served:
        """Serve each by its own engine without speculation; other ways may speculate."""
        traces = []
        for request in self.requests:
            engine = Engine(self.network, context_limit=self.limit)
            traces += self._drive(engine, [engine.submit(replace(request, speculate="off"))])
        return traces, ""

    def generated(self) -> Served:
        """Serve each through `generate`, as the chat and `run` do."""
        traces = []
        for request in self.requests:
            engine = Engine(self.network, context_limit=self.limit)
            traces.append(Trace(len(request.prompt)))
            for event in engine.generate(request):
                traces[-1].add(event)
                self._tick()
        return traces, ""

    def together(self, max_running: int, chunk_budget: ChunkBudget | None = None) -> Served:
        """Submit all at once with at most `max_running` running; others join as some end."""
        engine = Engine(self.network, context_limit=self.limit, max_running=max_running, chunk_budget=chunk_budget)
        sequences = [engine.submit(request) for request in self.requests]
        return self._drive(engine, sequences), ""

    def joining(self, max_running: int, seed: int) -> Served:
        """Submit at random times; a third ends early, a third is cancelled. Partial answers are compared.

        In one of 50 steps the youngest is preempted.
        """
        draw = random.Random(seed)
        engine = Engine(self.network, context_limit=self.limit, max_running=max_running)
        traces = [Trace(len(request.prompt)) for request in self.requests]
        fates = [number % 3 for number in range(len(traces))]  # 0: unchanged, 1: ends early, 2: cancelled
        draw.shuffle(fates)
        to_come = list(range(len(traces)))
        draw.shuffle(to_come)
        numbers: dict[EngineSequence, int] = {}
        engine.ending.on_release = lambda sequence: traces[numbers[sequence]].see(sequence.cache)
        watch = _PreemptionCount()
        while to_come or engine.has_work:
            # In each step: perhaps submit one, perhaps preempt one, make the step, perhaps cancel some. The chances let
            # several run together; an answer to be cancelled mostly gets some 25 steps far, about as long as it is.
            if to_come and (draw.random() < 0.3 or not engine.has_work):
                number = to_come.pop()
                request = self.requests[number]
                assert request.max_tokens is not None
                if fates[number] == 1:
                    request = replace(request, max_tokens=draw.randrange(1, request.max_tokens + 1))
                numbers[engine.submit(request)] = number
            if draw.random() < 0.02:
                engine.preempt_youngest()
            for sequence, event in engine.step():
                traces[numbers[sequence]].add(event)
            watch.look(numbers)
            for sequence, number in numbers.items():
                if fates[number] == 2 and sequence.state != "finished" and draw.random() < 0.04:
                    engine.cancel(sequence)
            self._tick()
        note = f"{fates.count(1)} ended early, {fates.count(2)} cancelled"
        return traces, f"{note}, preemptions: {watch.times}"

    def preempted(self, max_running: int) -> Served:
        """Serve with too little memory, so that the youngest are preempted and prefilled again.

        Prompts end shortly before a block does. Half are admitted, with memory for all but one to grow, and prefilled
        in one pass, so that all need a block at about the same time.
        """
        at_once = FixedPace(lambda: len(self.requests) * CHUNK)
        memory = self._memory(2 * (len(self.requests) // 2) - 1)
        engine = Engine(
            self.network,
            context_limit=self.limit,
            max_running=max_running,
            kv_memory=memory,
            chunk_budget=at_once,
        )
        sequences = [engine.submit(request) for request in self.requests]
        watch = _PreemptionCount()
        traces = self._drive(engine, sequences, lambda: watch.look(sequences))
        return traces, f"preemptions: {watch.times}"

    def sharing(self, prompt: Sequence[int]) -> Served:
        """Serve after a request that begins with `prompt`: as turns of a chat, then in a batch."""
        engine = Engine(self.network, context_limit=self.limit, keep_prefix=True)
        turns: list[Trace] = []
        for request in [replace(self.requests[0], prompt=[*prompt, 0]), *self.requests]:
            turns.append(Trace(len(request.prompt)))
            for event in engine.generate(request):
                turns[-1].add(event)
                self._tick()
        sequences = [engine.submit(request) for request in self.requests]
        traces = self._drive(engine, sequences)
        reused = sum(sequence.reused for sequence in sequences)
        return [*turns[1:], *traces], f"{reused} prompt tokens cached"

    def restarted(self) -> Served:
        """Serve, store on disk, and serve as a batch by another engine that loads the stored prefixes."""
        before, after = (Engine(self.network, context_limit=self.limit, keep_prefix=True) for _ in range(2))
        assert before.kv.pool is not None
        assert after.kv.pool is not None
        with TemporaryDirectory() as folder:
            store = DiskStore(Path(folder), 1 << 40)  # bytes: nothing is dropped
            for request in self.requests:
                sequence = before.submit(request)
                self._drive(before, [sequence])
                store_blocks(before.kv.pool, sequence.tokens, store)
            for request in self.requests:
                load_blocks(after.kv.pool, request.prompt[:-1], store)
                self._tick()
        sequences = [after.submit(request) for request in self.requests]
        traces = self._drive(after, sequences)
        return traces, f"{sum(sequence.reused for sequence in sequences)} prompt tokens came from disk"

    def _memory(self, pieces: int) -> int:
        """Return the bytes of so many blocks, at least those of one sequence."""
        return max(self.network.cost.kv_bytes(pieces * CHUNK), self.network.cost.kv_bytes(self.limit))

    def _drive(self, engine: Engine, sequences: Sequence[EngineSequence], between: Tick = lambda: None) -> list[Trace]:
        traces = {sequence: Trace(len(sequence.request.prompt)) for sequence in sequences}
        engine.ending.on_release = lambda sequence: traces[sequence].see(sequence.cache)
        while engine.has_work:
            for sequence, event in engine.step():
                traces[sequence].add(event)
            between()
            self._tick()
        return list(traces.values())


class _PreemptionCount:
    """Counts preemptions."""

    def __init__(self) -> None:
        self.times = 0
        self._now: set[EngineSequence] = set()

    def look(self, sequences: Iterable[EngineSequence]) -> None:
        """Count new preemptions; called after every step."""
        now = {sequence for sequence in sequences if sequence.state == "preempted"}
        self.times += len(now - self._now)
        self._now = now
