"""The model inside the engine's process: loads it, answers conversations with it, and sends what happens as events.

Everything here runs on one thread, which owns the model. Deltas are gathered: where decoding takes every core, what a
message costs is taken from the decode.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from headrace.app.engine.messages import (
    ContextFull,
    Damaged,
    Delta,
    Done,
    DraftCounted,
    Dropped,
    Event,
    Generate,
    ModelCard,
    ModelSpec,
    PeakMeasured,
    Prefill,
    PrefixCached,
    ReadAhead,
)
from headrace.app.sampling_options import sampling_settings
from headrace.models.load import LoadedModel, load_resolved
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.progress import Progress
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.models.text.answer import Completed, TextChunk, answer
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime import ops
from headrace.runtime.engine import Engine
from headrace.runtime.machine import memory
from headrace.runtime.machine.bandwidth import measure_peak, read_now
from headrace.runtime.machine.compute import cached_compute, measure_compute
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import Peak, cached_peak, correct
from headrace.runtime.request import CancelFlag, Finished, Request
from headrace.runtime.sampling import SamplingParams
from headrace.runtime.telemetry import StepRecord, mbu

_GATHER_S = 0.07  # between two deltas: the chat looks less often, and hardly ever in vain
_RECORDS_S = 0.4  # between two that bring the records of steps, from which figures are made
_READ_AGAIN_S = 600.0  # between two looks at the memory's speed by an idle chat
LEAST_ROOM = 256  # tokens an answer should have; an eighth of the context where that is less
_ROOMY = 0.75  # of the context: what a prompt may take after oldest turns were dropped, so that more turns fit

Send = Callable[[Event], None]
Messages = Sequence[Mapping[str, str]]


class EngineHost:
    """One loaded model and its engine, which keeps the conversation's KV cache between turns."""

    def __init__(self, loaded: LoadedModel, resolved: ResolvedModel, load_s: float) -> None:
        self._loaded = loaded
        self._resolved = resolved
        self._load_s = load_s
        self._engine = Engine(loaded.network, context_limit=loaded.context_limit, keep_prefix=True)
        self._prompts = ChatPrompt(loaded.tokenizer)
        self._spare_cpus = _spare_cpus(machine())
        self.peak: Peak | None = cached_peak()
        self.compute_flops = cached_compute()
        self._read_at = float("-inf")  # when memory was read last
        self._check = BackgroundCheck(resolved)
        self._file_tokens: dict[str, int] = {}  # of the files that go with what is being typed

    @classmethod
    def load(cls, spec: ModelSpec, progress: Progress) -> "EngineHost":
        """Fetch if need be, and load. Raises what `resolve` and `load_resolved` raise."""
        started = time.perf_counter()
        resolved = resolve(spec.name, progress=progress)
        progress("loading weights", 0, None)
        loaded = load_resolved(resolved, context=spec.context, force=spec.force)
        return cls(loaded, resolved, time.perf_counter() - started)

    def card(self) -> ModelCard:
        """The model and its machine as the screen shows them."""
        import mlx.core as mx

        host = machine()
        _ = host.chip  # asked here, where it may take its time: the answer travels with the machine
        loaded = self._loaded
        return ModelCard(
            name=loaded.name,
            path=str(self._resolved.path),
            origin=self._resolved.origin,
            licence=self._resolved.licence,
            kind=loaded.kind,
            context_limit=loaded.context_limit,
            weight_bytes=loaded.checkpoint.nbytes,
            cost=loaded.network.cost,
            generation_defaults=loaded.generation_defaults,
            thinks=self._prompts.thinks,
            load_s=self._load_s,
            machine=host,
            peak=self.peak,
            budget=memory.budget(),
            kernels=ops.describe(),
            spare_cpus=self._spare_cpus,
            active_memory_bytes=mx.get_active_memory(),
            notes=tuple(loaded.notes),
            compute_flops=self.compute_flops,
        )

    def check_files(self, send: Send) -> None:
        """Read the model's files again from now on, whenever nothing else is to be done; Damaged tells of damage."""
        self._check.start(lambda damage: send(Damaged(str(damage), damage.hint)))

    def rest(self) -> None:
        """Leave the machine to others until `resume`."""
        self._check.pause()

    def resume(self) -> None:
        """Use idle time again."""
        self._check.resume()

    def warm_up(self) -> None:
        """What the first answer would otherwise wait for, done while the user types."""
        if self._loaded.tokenizer.chat_template is not None:
            self._loaded.tokenizer.chat_template.compile()

    @property
    def reading_due(self) -> bool:
        """Whether the machine should be measured while nobody waits: never yet, or its memory not for a while."""
        return self.peak is None or self.compute_flops is None or time.monotonic() - self._read_at > _READ_AGAIN_S

    def measure(self) -> PeakMeasured:
        """One measurement of this machine, which takes up to a second: for a chat that has nothing to do.

        Memory is read first; how fast it multiplies is measured at the next call, once and for all.
        """
        with self._check.paused():
            if self.peak is None or self.compute_flops is not None:
                read = measure_peak() if self.peak is None else read_now("chat")
                self._read_at = time.monotonic()
                self.peak = cached_peak() or read
            else:
                self.compute_flops = measure_compute()
        return PeakMeasured(self.peak, self.compute_flops)

    def generate(self, command: Generate, cancel: CancelFlag, send: Send) -> None:
        """Answer a conversation; the last event sent is Done or ContextFull. Raises HeadraceError for bad requests."""
        sampling = SamplingParams(
            **sampling_settings(command.sampling, self._loaded.generation_defaults, command.otherwise)
        )
        started = time.perf_counter()
        prompt = self._fit(command, send)
        if prompt is None:
            return
        tokenize_s = time.perf_counter() - started
        request = Request(
            prompt=prompt,
            max_tokens=command.max_tokens,
            sampling=sampling,
            stop_ids=self._loaded.tokenizer.eos_ids,
            cancel=cancel,
        )
        opening = "" if command.continue_text else self._prompts.opening(prompt)
        outbox = _Outbox(command, send, opening)
        with self._check.paused():
            for part in answer(self._engine, self._loaded.tokenizer, request, command.stop):
                if isinstance(part, TextChunk):
                    outbox.add(part.text, part.step.record)
                elif isinstance(part, Completed):
                    outbox.add(part.text, part.finished.stop_record)
                    outbox.flush()
                    send(self._done(command, part.finished, tokenize_s, outbox.ttft_s))
                else:
                    send(Prefill(command.id, part.done, part.total, part.reused))

    def read_ahead(self, command: ReadAhead, stop: Callable[[], bool], send: Send) -> None:
        """Prefill what the next prompt will begin with, until `stop()`. Raises HeadraceError for what has no prompt."""
        prompt = self._prompts.encode(command.messages, thinking=command.thinking)
        said = command.messages[-1]
        message = self._count(said["content"]) if said["role"] == "user" else 0
        self._file_tokens = {text: self._file_tokens.get(text) or self._count(text) for text in command.files}
        files = tuple(self._file_tokens[text] for text in command.files)
        send(DraftCounted(command.id, len(prompt), self._longest_prompt, message, files))
        if command.count_only or len(prompt) > self._longest_prompt:
            return
        with self._check.paused():
            cache = self._engine.read_ahead(prompt, stop)
        if cache is not None:
            send(PrefixCached(cache.committed, cache.committed_bytes, cache.allocated_bytes))

    def _count(self, text: str) -> int:
        return len(self._loaded.tokenizer.encode(text))

    def _done(self, command: Generate, finished: Finished, tokenize_s: float, ttft_s: float | None) -> Done:
        summary = finished.summary
        moved = round(summary.achieved_gb_s * 1e9 * summary.tpot_s) if summary.achieved_gb_s and summary.tpot_s else 0
        self.peak = correct(summary.achieved_gb_s, step_bytes=moved, steps=summary.steps) or self.peak
        entries = summary.prompt_tokens - 1 + summary.steps
        return Done(
            id=command.id,
            reason=finished.reason,
            summary=summary,
            tokenize_s=tokenize_s,
            ttft_s=ttft_s,
            context_full=finished.reason == "length" and entries >= self._loaded.context_limit,
            mbu=mbu(summary.achieved_gb_s, self.peak.gb_s if self.peak else None),
        )

    def _fit(self, command: Generate, send: Send) -> list[int] | None:
        """The prompt's ids, oldest turns dropped if that was asked for; None (and ContextFull sent) if it is too long.

        Raises UsageError and CheckpointError (see `Tokenizer.encode_chat`).
        """
        limit, longest = self._loaded.context_limit, self._longest_prompt
        prompt = self._encode(command)
        if len(prompt) <= longest:
            return prompt
        if command.drop_oldest and (starts := _turn_starts(command.messages)):
            roomy = bisect_left(starts, True, key=lambda count: len(self._encode(command, count)) <= limit * _ROOMY)
            count = starts[min(roomy, len(starts) - 1)]
            shorter = self._encode(command, count)
            if len(shorter) <= longest:
                send(Dropped(command.id, count))
                return shorter
        send(ContextFull(command.id, len(prompt), limit))
        return None

    @property
    def _longest_prompt(self) -> int:
        limit = self._loaded.context_limit
        return limit - min(LEAST_ROOM, limit // 8)

    def _encode(self, command: Generate, without: int = 0) -> list[int]:
        """The prompt's ids, the first `without` messages left out."""
        messages = _without(command.messages, without)
        return self._prompts.encode(messages, command.continue_text, thinking=command.thinking)


class _Outbox:
    """Text and records of one answer on their way to the chat: the first text at once, then what _GATHER_S brings.

    opening: text that belongs to the answer though the template wrote it; it goes with the first of the model's.
    """

    def __init__(self, command: Generate, send: Send, opening: str) -> None:
        self._command = command
        self._send = send
        self._opening = opening
        self._text: list[str] = []
        self._records: list[StepRecord] = []
        self._sent = self._records_sent = float("-inf")
        self.ttft_s: float | None = None

    def add(self, text: str, record: StepRecord | None = None) -> None:
        now = time.monotonic()
        if record is not None:
            self._records.append(record)
        if text:
            text, self._opening = self._opening + text, ""
            self._text.append(text)
            if self.ttft_s is None:
                self.ttft_s = now - self._command.submitted
                self._sent = float("-inf")  # the first text goes at once
        if now - self._sent >= _GATHER_S:
            self._flush(with_records=now - self._records_sent >= _RECORDS_S)

    def flush(self) -> None:
        """Send all there is."""
        self._flush(with_records=True)

    def _flush(self, *, with_records: bool) -> None:
        records: list[StepRecord] = []
        if with_records:
            records, self._records = self._records, records
        if self._text or records:
            self._send(Delta(self._command.id, "".join(self._text), tuple(records), self.ttft_s))
            self._text = []
        self._sent = time.monotonic()
        if records:
            self._records_sent = self._sent


def _spare_cpus(host: Machine) -> int:
    """CPUs, hyper-threads included, that the kernels' threads leave to others; with a GPU nearly all of them."""
    native = ops.native.status() if ops.select() is ops.native else None
    scheduled = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limited = host.usable_cores < min(host.physical_cores, scheduled)  # by the container's share of time
    busy = native.threads if native is not None and native.threads else 1
    return max(0, (host.usable_cores if limited else scheduled) - busy)


def _turn_starts(messages: Messages) -> list[int]:
    """How many messages may be left out so that what remains begins with a user's; the last turn always remains."""
    turns = messages[_system(messages) :]
    return [i for i, message in enumerate(turns) if i > 0 and message["role"] == "user"]


def _without(messages: Messages, count: int) -> list[Mapping[str, str]]:
    """All but the first `count` messages after the system message."""
    system = _system(messages)
    return [*messages[:system], *messages[system + count :]]


def _system(messages: Messages) -> int:
    return int(bool(messages) and messages[0]["role"] == "system")
