"""`/metrics`: counters, gauges and histograms of the server for Prometheus, from the engines' events.

Names and labels are public: dashboards break if one changes. Figures come from the events that all listeners of a
`ServedEngine` get. Guard: tests/app/server/test_figures.py.
"""

import asyncio
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from headrace.app.engine.events import BatchStatus, Delta, Died, Done, Event, Failed, PeakMeasured
from headrace.app.server.engine import ServedEngine
from headrace.runtime.engine.request import Finished

# Upper edges of the histograms' buckets, in seconds and in sequences.
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The figures of one server, over all its models. `take` is a listener of an engine.

    engines: returns those of the models that were asked for.
    """

    def __init__(self, engines: Callable[[], list[ServedEngine]]) -> None:
        # Each counter would have a second series, of the time at which the server started.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._loads: dict[ServedEngine, BatchStatus] = {}  # the latest of each loaded model

        # Sums and distributions, which events add to
        self.requests = Counter(
            "headrace_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self._ttft = Histogram("headrace_ttft_seconds", "Time to first token.", registry=registry, buckets=_TTFT_S)
        self._itl = Histogram("headrace_itl_seconds", "Inter-token latency.", registry=registry, buckets=_ITL_S)
        self._queue = Histogram(
            "headrace_queue_seconds", "Time from a request to its admission.", registry=registry, buckets=_TTFT_S
        )
        self._batch = Histogram("headrace_batch_size", "Sequences of a step.", registry=registry, buckets=_BATCH)
        self._tokens = Counter("headrace_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self._drafts = Counter("headrace_draft_tokens", "Draft tokens by outcome.", ["outcome"], registry=registry)
        self._ended = Counter("headrace_answers", "Answers by the reason of their end.", ["reason"], registry=registry)
        self._deaths = Counter("headrace_engine_deaths", "Ends of the engine process by itself.", registry=registry)

        # The latest values
        self._sequences = Gauge("headrace_sequences", "Sequences by state.", ["state"], registry=registry)
        self._kv = Gauge("headrace_kv_bytes", "K/V memory: used, and the budget.", ["kind"], registry=registry)
        self._blocks = Gauge("headrace_kv_blocks", "K/V blocks by state.", ["state"], registry=registry)
        self._bandwidth = Gauge("headrace_achieved_bandwidth_gb_s", "Of the latest answer, in GB/s.", registry=registry)
        self._mbu = Gauge("headrace_mbu", "Model bandwidth utilisation of the latest answer.", registry=registry)
        self._memory = Gauge("headrace_memory_gb_s", "Measured memory bandwidth, in GB/s.", registry=registry)

        # Values that are asked for when the page is read
        open_ = Gauge("headrace_open_answers", "Answers that run or wait.", registry=registry)
        open_.set_function(lambda: sum(engine.open for engine in engines()))
        tasks = Gauge("headrace_tasks", "Asyncio tasks of the server.", registry=registry)
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        ready = Gauge("headrace_model_loaded", "1 if the model of the start is loaded.", registry=registry)
        ready.set_function(lambda: engines()[0].state == "ready")
        loaded = Gauge("headrace_models_loaded", "Loaded models.", registry=registry)
        loaded.set_function(lambda: sum(engine.state == "ready" for engine in engines()))

    def take(self, engine: ServedEngine, event: Event) -> None:
        """Count an event of an engine."""
        match event:
            case Delta():
                for record in event.records:
                    for latency in record.itl_s:
                        self._itl.observe(latency)
            case Done():
                self._count(event.end)
            case BatchStatus():
                for batch in event.batches:
                    self._batch.observe(batch)
                self._loads[engine] = event
            case Failed(id=int()):
                self._ended.labels("failed").inc()
            case Died():
                self._deaths.inc()
            case PeakMeasured():
                self._memory.set(event.memory_gb_s or event.peak.gb_s)

    def text(self) -> bytes:
        """Return the figures in Prometheus's text format."""
        self._sum_loads()
        return generate_latest(self._registry)

    def _count(self, end: Finished) -> None:
        """Count an answer that has ended."""
        summary = end.summary
        self._ended.labels(end.reason).inc()
        self._queue.observe(summary.queue_s)
        if summary.ttft_s is not None:
            self._ttft.observe(summary.ttft_s)
        kinds = {"prompt": summary.prompt_tokens, "cached": summary.reused_tokens, "output": summary.completion_tokens}
        for kind, count in kinds.items():
            self._tokens.labels(kind).inc(count)
        self._drafts.labels("accepted").inc(summary.accepted)
        self._drafts.labels("rejected").inc(max(0, summary.proposed - summary.accepted))
        if summary.achieved_gb_s is not None:
            self._bandwidth.set(summary.achieved_gb_s)
        if summary.mbu is not None:
            self._mbu.set(summary.mbu)

    def _sum_loads(self) -> None:
        """Set the gauges of sequences and K/V to the sums of all loaded models."""
        loads = [status for engine, status in self._loads.items() if engine.is_started]
        if not self._loads:
            return
        states = [state for status in loads for state in status.states.values()]
        for state in ("waiting", "prefill", "decode", "preempted"):  # those of `sequence.State` before its end
            self._sequences.labels(state).set(states.count(state))
        self._kv.labels("used").set(sum(status.kv_used_bytes for status in loads))
        self._kv.labels("budget").set(sum(status.kv_room_bytes for status in loads))
        pools = [status.blocks for status in loads if status.blocks is not None]
        for state in ("used", "shared", "cached", "free"):  # fields of `PoolStats`
            self._blocks.labels(state).set(sum(getattr(blocks, state) for blocks in pools))
