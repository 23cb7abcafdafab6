"""The model inside the engine's process: loads it, answers conversations with it, and sends what happens as events.

Everything here runs on one thread, which owns the model; `app.engine.serving` has what is being answered.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from headrace.app.config.kv_option import kv_choice
from headrace.app.engine.kept_chats import KeptChats, kept_bytes, kv_key
from headrace.app.engine.messages import (
    Damaged,
    Generate,
    ModelCard,
    ModelSpec,
    PeakMeasured,
    PrefetchPrompt,
    PrefixCached,
    PromptCounted,
)
from headrace.app.engine.outbox import Send
from headrace.app.engine.serving import Serving
from headrace.models.loading.draft import load_draft
from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.progress import Progress
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime import ops
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import HeadraceError
from headrace.runtime.machine import memory
from headrace.runtime.machine.bandwidth import measure_peak, read_now
from headrace.runtime.machine.compute import cached_compute, measure_compute
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import Peak, cached_peak, correct
from headrace.runtime.metrics.telemetry import Summary, mbu
from headrace.runtime.network import Network
from headrace.runtime.speculation.pass_costs import PassCostStore

_READ_AGAIN_S = 600.0  # between two looks at the memory's speed by an idle chat


class EngineHost:
    """One loaded model and its engine, which keeps the conversation's KV cache between turns."""

    def __init__(
        self, loaded: LoadedModel, resolved: ResolvedModel, load_s: float, draft: Network[Any] | None = None
    ) -> None:
        self._loaded = loaded
        self._resolved = resolved
        self._load_s = load_s
        limit, key = loaded.context_limit, kv_key(resolved.path, loaded.network)
        self._engine = Engine(
            loaded.network,
            context_limit=limit,
            keep_prefix=True,
            kv_key=key,
            draft=draft,
            pass_costs=PassCostStore(loaded.network.cost),
        )
        self._prompts = ChatPrompt(loaded.tokenizer)
        self._kept = KeptChats(self._engine, kept_bytes())
        self._serving = Serving(loaded, self._engine, self._prompts, self._kept, self._mbu, drafted=draft is not None)
        self._spare_cpus = _spare_cpus(machine())
        self.peak: Peak | None = cached_peak()
        self.compute_flops = cached_compute()
        self._read_at = float("-inf")  # when memory was read last
        self._check = BackgroundCheck(resolved)
        self._file_tokens: dict[str, int] = {}  # of the files that go with what is being typed

    @classmethod
    def load(cls, spec: ModelSpec, progress: Progress) -> "EngineHost":
        """Fetch if need be, and load. Raises what `resolve` and `load_resolved` raise.

        A draft model that is none for this one is left out, and said.
        """
        started = time.perf_counter()
        resolved = resolve(spec.name, progress=progress)
        progress("loading weights", 0, None)
        loaded = load_resolved(resolved, context=spec.context, kv=kv_choice(spec.kv), force=spec.force)
        draft = _draft(spec, loaded, progress)
        return cls(loaded, resolved, time.perf_counter() - started, draft)

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
            kv=loaded.kv.name if loaded.kv else None,
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

    @property
    def keeping_due(self) -> bool:
        """Whether what was said last is still to be written to disk."""
        return self._kept.due

    def keep(self, stop: Callable[[], bool]) -> None:
        """Write it, until `stop()`, which is asked before every block."""
        with self._check.paused():
            self._kept.write(stop)

    @property
    def busy(self) -> bool:
        """Whether something is being answered, or to be put away after that."""
        return bool(self._serving)

    def begin(self, command: Generate, cancel: CancelFlag, send: Send) -> None:
        """Answer a conversation, beside what is being answered; what it says comes from `step`, Done at the
        end. Where its prompt is too long, ContextFull is all there is. Raises HeadraceError for bad requests.
        """
        self._serving.begin(command, cancel, send)
        if self._serving:
            self._check.pause()

    def step(self, send: Send) -> None:
        """One step of all that are being answered. Raises what `Engine.step` raises: then all are lost, see `lost`."""
        self._serving.step(send)
        if not self._serving:
            self._check.resume()

    def lost(self) -> list[int]:
        """What was being answered when `step` failed: the ids."""
        self._check.resume()
        return self._serving.lost()

    def prefetch(self, command: PrefetchPrompt, stop: Callable[[], bool], send: Send) -> None:
        """Prefill what the next prompt will begin with, until `stop()`. Raises HeadraceError for what has no prompt."""
        prompt = self._prompts.encode(command.messages, thinking=command.thinking)
        said = command.messages[-1]
        message = self._count(said["content"]) if said["role"] == "user" else 0
        self._file_tokens = {text: self._file_tokens.get(text) or self._count(text) for text in command.files}
        files = tuple(self._file_tokens[text] for text in command.files)
        send(PromptCounted(command.id, len(prompt), self._serving.fitting.longest, message, files))
        if command.count_only or len(prompt) > self._serving.fitting.longest:
            return
        with self._check.paused():
            self._kept.bring_back(prompt)
            read = self._engine.read_ahead(prompt, stop)
        if read is not None:
            send(PrefixCached(read.tokens, read.used_bytes, read.allocated_bytes))

    def _count(self, text: str) -> int:
        return len(self._loaded.tokenizer.encode(text))

    def _mbu(self, summary: Summary) -> float | None:
        """How close an answer came to the memory's limit, which it may have shown to be higher."""
        self.peak = correct(summary.achieved_gb_s, step_bytes=summary.mean_step_bytes, steps=summary.steps) or self.peak
        return mbu(summary.achieved_gb_s, self.peak.gb_s if self.peak else None)


def _spare_cpus(host: Machine) -> int:
    """CPUs, hyper-threads included, that the kernels' threads leave to others; with a GPU nearly all of them."""
    native = ops.native.status() if ops.select() is ops.native else None
    scheduled = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limited = host.usable_cores < min(host.physical_cores, scheduled)  # by the container's share of time
    busy = native.threads if native is not None and native.threads else 1
    return max(0, (host.usable_cores if limited else scheduled) - busy)


def _draft(spec: ModelSpec, loaded: LoadedModel, progress: Progress) -> Network[Any] | None:
    """The draft's network, if there is one and it fits the model."""
    if spec.draft is None:
        return None
    try:
        return load_draft(resolve(spec.draft, progress=progress), loaded).network
    except HeadraceError as error:
        loaded.notes.append(f"without the draft {spec.draft}: {error}")
        return None
