"""The loaded model in the engine process: answers of requests as events, prompt prefetch, the model card.

`process.py` calls it: `prepare` on the threads of its `Preparation`, everything else, which may compute, on the thread
that loaded the model. A request goes `prepare`, then the call that it returns, then `step` until its `Done`.

Guards: tests/app/engine/test_client.py for a host in its process, test_side_by_side.py for one without.
"""

import os
import time
from collections.abc import Callable

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.app.answer.answer import Answer, EncodedPrompt
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.prompt_reuse import ReuseLog
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.batch_monitor import BatchMonitor
from headrace.app.engine.commands import TIMED_EVERY, CountTokens, Generate, PrefetchPrompt
from headrace.app.engine.events import (
    Abandoned,
    Done,
    Failed,
    Prefill,
    PrefixCached,
    PromptCounted,
    Repeats,
    SlowFirstPass,
    TokensCounted,
)
from headrace.app.engine.idle_work import IdleWork
from headrace.app.engine.kv_disk_cache import KVDiskCache, disk_cache_bytes, kv_key
from headrace.app.engine.model_card import ModelCard
from headrace.app.engine.outbox import SERVED_TEXT_S, TEXT_S, Outbox, Send
from headrace.app.engine.prompt_fit import PromptFit
from headrace.app.hosts.load import load_model
from headrace.app.predict.uses import Recommendation
from headrace.models.loading.draft import load_draft
from headrace.models.loading.load import LoadedModel
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.resolve import DEFAULT_MODEL, ResolvedModel, resolve
from headrace.models.registry.store import Store
from headrace.models.text.encoding import EncodingStoppedError, encoding_ends
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime import ops
from headrace.runtime.engine.request import CancelFlag, PrefillProgress, SequenceFailed
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import HeadraceError, expected
from headrace.runtime.machine import memory
from headrace.runtime.machine.garbage import watch_garbage
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.network import Network


class _Running(Struct):
    """A request being answered.

    repeats, explained: a `Repeats` event, and the reuse of its prompt, were sent.
    """

    command: Generate
    outbox: Outbox
    sequence: Sequence
    repeats: bool = False
    explained: bool = False

    @property
    def id(self) -> int:
        return self.command.id


class EngineHost:
    """One loaded model, its answers and its idle work.

    loaded: the network, its tokenizer, and facts about both.
    resolved: its files.
    load_s: seconds that loading took.
    draft: a draft model's network, for speculative decoding.
    spec: the way it was loaded, and whether a server or a chat reads the answers.

    idle: work between answers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        resolved: ResolvedModel,
        load_s: float,
        draft: Network | None = None,
        spec: ModelSpec = ModelSpec(),  # noqa: B008 - immutable
    ) -> None:
        self._loaded = loaded
        self._serving = spec.serving
        self._text_s = SERVED_TEXT_S if spec.serving else TEXT_S
        self._resolved = resolved
        self._load_s = load_s
        key = kv_key(resolved.path, loaded.network, resolved.adapter)
        self._answerer = Answerer(
            loaded,
            draft=draft,
            keep_prefix=True,
            max_running=spec.max_running,
            kv_key=key,
            own_processes=[os.getppid()],  # the chat's
            mbu=lambda summary: self.idle.mbu(summary),  # made below: it writes the K/V of this engine
        )
        self._disk_cache = KVDiskCache(self._answerer.engine, disk_cache_bytes())
        self._fit = PromptFit(self._answerer.chat_prompt, loaded.context_limit, whole=spec.serving)
        self._batch = BatchMonitor(self._answerer.engine, always=spec.serving)
        self._reuse = ReuseLog(loaded.tokenizer)
        self._running: dict[Answer, _Running] = {}
        self._file_tokens: dict[str, int] = {}  # by text: counts of files of the last prefetch
        self._spare_cpus = _spare_cpus(machine())
        self.idle = IdleWork(resolved, self._disk_cache)
        if spec.serving:  # any request may have a schema
            self.idle.prepare = self._answerer.prepare_grammars
        watch_garbage()

    @classmethod
    def load(cls, spec: ModelSpec, progress: Progress, download_progress: Progress = silent) -> "EngineHost":
        """Fetch the model if need be, and load it; a draft that does not fit is left out. Raises the errors of both.

        progress: of loading.
        download_progress: of what comes before: downloads and conversions.
        """
        started = time.perf_counter()
        resolved = resolve(spec.name, progress=download_progress)
        progress("loading weights", 0, None)
        loaded = load_model(resolved, spec, progress)
        draft = _draft(spec, loaded, progress, download_progress)
        return cls(loaded, resolved, time.perf_counter() - started, draft, spec)

    def card(self) -> ModelCard:
        """Return the facts of the model and its machine."""
        host = machine()
        _ = host.chip  # looked up here, where it may take its time: the card carries the result to the chat
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
            thinks=self._answerer.chat_prompt.thinks,
            load_s=self._load_s,
            machine=host,
            peak=self.idle.peak,
            budget=memory.budget(),
            kernels=ops.describe(),
            spare_cpus=self._spare_cpus,
            active_memory_bytes=mx.get_active_memory(),
            notes=tuple(loaded.notes),
            kv=loaded.kv.name if loaded.kv else None,
            activations=loaded.activations,
            compute_flops=self.idle.compute_flops,
            thinking_levels=self._answerer.chat_prompt.has_levels,
            ranks=loaded.ranks,
            is_sample=self.is_sample,
        )

    @property
    def is_sample(self) -> bool:
        """True for the default model, which is there to try the program with."""
        return self._resolved.stored_as == DEFAULT_MODEL

    def recommended(self) -> Recommendation | None:
        """Return the model to use in place of the sample model, on this machine."""
        from headrace.app.predict.recommend import recommended_for_chat  # not needed for other models

        usable = None
        if (budget := memory.budget()) is not None:
            usable = budget.usable + mx.get_active_memory()
        model = recommended_for_chat(machine(), usable)
        if model is None:
            return None
        return replace(model, installed=model.name in Store().names())

    def warm_up(self) -> None:
        """Compile the chat template, so that the first answer does not wait for it."""
        if self._loaded.tokenizer.chat_template is not None:
            self._loaded.tokenizer.chat_template.compile()

    def report_first_pass(self, send: Send) -> None:
        """Send `SlowFirstPass` while the first pass takes long."""
        self._answerer.engine.first_pass.report = lambda seconds: send(SlowFirstPass(seconds))

    @property
    def busy(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._running) or self._answerer.has_work

    def prepare(self, command: Generate | CountTokens, cancel: CancelFlag, send: Send) -> Callable[[], None] | None:
        """Encode a prompt and compile its grammar, on any thread. Return the call that begins the answer.

        The call belongs to the model's thread; the answer's events then come from `step`. None is returned if all
        is sent already:

        - a CountTokens: TokensCounted, or Abandoned.
        - a prompt that is too long: ContextFull.
        - `cancel` set before the prompt is encoded: Abandoned.

        Raises HeadraceError for bad requests; on a server also for a text that certainly exceeds the context.
        """
        if isinstance(command, CountTokens):
            send(self._counted(command, cancel))
            return None
        # Encode the prompt, within the context limit.
        began = time.monotonic()
        max_tokens = self._loaded.context_limit if self._serving else None
        try:
            with encoding_ends(cancel.__bool__, max_tokens):
                ids = self._fit.fit(command, send)
        except EncodingStoppedError:
            send(Abandoned(command.id))
            return None
        if ids is None:
            return None
        prompt = self._encoded_prompt(command, ids, began)
        answer = self._answerer.prepare(prompt, command.options, logprobs=command.logprobs, cancel=cancel)
        outbox = Outbox(command.id, answer, send, text_s=self._text_s)

        def start() -> None:
            self._disk_cache.load(ids)
            sequence = self._answerer.submit(answer)
            self._running[answer] = _Running(command, outbox, sequence)
            self._batch.started(len(self._running))
            self.idle.busy()

        return start

    def _encoded_prompt(self, command: Generate, ids: list[int], began: float) -> EncodedPrompt:
        """Return a prompt with the text that its answer begins with: a client's or an earlier part, or the template's.

        began: when encoding the prompt began, on the monotonic clock. It ends now.
        """
        begun = command.begun
        chat = command.prompt is None
        opening = ""
        if chat and not begun.text:
            opening = self._answerer.chat_prompt.opening(ids)
        # A client that sent half a thinking section gets the rest as it is. In the chat, an answer continued after its
        # section is all content.
        if self._serving:
            has_kinds = self._answerer.chat_prompt.thinks and chat and not begun.is_open
        else:
            has_kinds = begun.is_open or not begun.text
        return EncodedPrompt(
            ids,
            opening,
            thinking=bool(opening) or begun.is_open,
            chat=chat,
            tools=command.tools,
            begun=begun.content,
            started=command.submitted,
            waited_s=began - command.submitted,
            tokenize_s=time.monotonic() - began,
            has_kinds=has_kinds,
        )

    def limit_kv(self, total: int) -> None:
        """Use at most `total` bytes for K/V."""
        self._answerer.engine.limit_kv(total)

    def step(self, send: Send, timed_every: int = TIMED_EVERY) -> None:
        """Run one step of all answers. Raises the errors of `Engine.step`: call `drop` then.

        timed_every: one decode step in so many is timed by part; 0: none.
        """
        batch = 0  # sequences of the step; 0 for one without tokens
        text_s = self._text_s
        if self._serving:  # the more answers, the less often come the deltas of each
            text_s *= max(1, len(self._running) / 2)
        self._answerer.engine.timer.every = timed_every
        for answer, event in self._answerer.step():
            running = self._running[answer]
            match event:
                case TextChunk():
                    batch = event.step.record.batch
                    self._batch.add(len(event.step.tokens))
                    running.outbox.text_s = text_s
                    running.outbox.add(event)
                    if answer.repeats and not running.repeats:
                        running.repeats = True
                        send(Repeats(running.id))
                case Completed():
                    del self._running[answer]
                    self._send_end(running, event, send)
                case SequenceFailed():
                    running.outbox.flush()
                    del self._running[answer]
                    error = expected(event.error)
                    send(Failed(running.id, str(error), error.hint, type(error).__name__))
                case _:  # the progress of a prefill
                    self._send_prefill(running, answer, event, send)
        states = {running.id: running.sequence.state for running in self._running.values()}
        self._batch.step(batch, states, send)
        if not self.busy:
            self.idle.idle()

    def _send_end(self, running: _Running, event: Completed, send: Send) -> None:
        """Send the rest of an answer's text and its end. Its tokens can be reused from now on."""
        running.outbox.add(event)
        running.outbox.flush()
        self._disk_cache.add(running.sequence.tokens)
        self._reuse.answered(running.sequence.tokens)
        end = event.finished
        fits = True
        if end.ended_by == "context_limit":
            fits = self._fit.last_turn_fits(running.command, end.summary.completion_tokens)
        send(Done(running.id, end, fits))

    def _send_prefill(self, running: _Running, answer: Answer, event: PrefillProgress, send: Send) -> None:
        """Send the progress of a prefill. The first event of an answer explains the reuse of its prompt."""
        reuse = None
        prompt: list[tuple[str, bool]] = []
        if not running.explained:
            running.explained = True
            reuse = self._reuse.explain(answer.prompt.ids, event.reused)
            if running.command.explain:
                prompt = self._loaded.tokenizer.marked(answer.prompt.ids)
        send(
            Prefill(
                id=running.id,
                done=event.done,
                total=event.total,
                reused=event.reused,
                waited_s=answer.prompt.waited_s,
                tokenize_s=answer.prompt.tokenize_s,
                reuse=reuse,
                unchecked_tools=tuple(answer.unchecked_tools),
                prompt=prompt,
                prefill_s=running.sequence.timeline.prefill_s,
            )
        )

    def drop(self) -> list[int]:
        """Forget all answers after `step` raised, and return their ids."""
        ids = [running.id for running in self._running.values()]
        self._running.clear()
        self._batch.reset()
        self.idle.idle()
        return ids

    def _counted(self, command: CountTokens, cancel: CancelFlag) -> TokensCounted | Abandoned:
        prompts = self._answerer.chat_prompt
        try:
            with encoding_ends(cancel.__bool__):
                ids = prompts.encode(
                    command.messages, thinking=command.thinking, tools=command.tools, variables=command.variables
                )
        except EncodingStoppedError:
            return Abandoned(command.id)
        return TokensCounted(command.id, len(ids))

    def prefetch(self, command: PrefetchPrompt, stop: Callable[[], bool], send: Send) -> None:
        """Count a prompt and prefill it until `stop()`. Raises HeadraceError for one that cannot be encoded."""
        last = command.messages[-1]
        self.idle.typing = last["role"] == "user"
        with encoding_ends(stop):
            prompt = self._answerer.chat_prompt.encode(
                command.messages, thinking=command.thinking, variables=command.variables
            )
            message = 0
            if last["role"] == "user":
                message = self._count(last["content"])
            self._file_tokens = {text: self._file_tokens.get(text) or self._count(text) for text in command.files}
        files = tuple(self._file_tokens[text] for text in command.files)
        send(PromptCounted(command.id, len(prompt), self._fit.longest, message, files))
        if command.count_only or len(prompt) > self._fit.longest:
            return
        with self.idle.paused():
            self._disk_cache.load(prompt)
            read = self._answerer.engine.prefetch(prompt, stop)
        if read is not None:
            reuse = self._reuse.explain(prompt, read.reused)
            self._reuse.prefetched(prompt, read.reused, read.tokens)
            shared = self._answerer.engine.shared_blocks(prompt)
            send(PrefixCached(read.tokens, read.used_bytes, read.allocated_bytes, reuse, shared))

    def _count(self, text: str) -> int:
        return len(self._loaded.tokenizer.encode(text))


def _draft(spec: ModelSpec, loaded: LoadedModel, progress: Progress, download_progress: Progress) -> Network | None:
    """Return the draft's network, or add a note to the model if it does not fit."""
    if spec.draft is None:
        return None
    try:
        return load_draft(resolve(spec.draft, progress=download_progress), loaded, progress).network
    except HeadraceError as error:
        loaded.notes.append(f"without the draft {spec.draft}: {error}")
        return None


def _spare_cpus(host: Machine) -> int:
    """Return the CPUs, hyper-threads included, that the kernels' threads do not use."""
    available = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS lacks it
        available = len(os.sched_getaffinity(0))
    if host.usable_cores < min(host.physical_cores, available):  # a container's share of time is the limit
        available = host.usable_cores
    busy = 1
    if ops.select() is ops.native:
        busy = ops.native.status().threads or 1
    return max(0, available - busy)
