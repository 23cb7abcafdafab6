"""The requests that the engine answers side by side, as events for the chat.

`begin` takes one up, also while others are being answered; `step` is one step of all of them. Events carry the id of
their request, and are what they would be if it were the only one. `Served` is sent while there are several.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.app.answer.sampling_options import sampling_settings
from headrace.app.answer.speculation import speculation
from headrace.app.engine.kept_chats import KeptChats
from headrace.app.engine.messages import Done, Failed, Generate, Prefill, Served
from headrace.app.engine.outbox import Outbox, Send
from headrace.app.engine.prompt_fit import PromptFit
from headrace.models.loading.load import LoadedModel
from headrace.models.text.answer import AnswerText, Completed, TextChunk
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag, Finished, Request
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.errors import HeadraceError, expected
from headrace.runtime.metrics.telemetry import Summary
from headrace.runtime.sampling.params import SamplingParams

_SERVED_S = 0.5  # between two looks at all of them together

Mbu = Callable[[Summary], float | None]


@dataclass(slots=True)
class _Answering:
    command: Generate
    text: AnswerText
    outbox: Outbox
    tokenize_s: float


class Serving:
    """What is being answered on one engine. mbu: how close a finished answer came to the memory's limit.
    drafted: the engine has a draft model."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        prompts: ChatPrompt,
        kept: KeptChats,
        mbu: Mbu,
        *,
        drafted: bool = False,
    ) -> None:
        self._loaded = loaded
        self._engine = engine
        self._prompts = prompts
        self._kept = kept
        self._mbu = mbu
        self._drafted = drafted
        self.fitting = PromptFit(prompts, loaded.context_limit)
        self._open: dict[Sequence, _Answering] = {}
        self._several = False  # were answered at some moment since the engine was idle
        self._told_at = float("-inf")
        self._tokens, self._batches = 0, list[int]()  # since then; since the last look

    def __bool__(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._open) or self._engine.has_work

    def begin(self, command: Generate, cancel: CancelFlag, send: Send) -> None:
        """Take up a request; where its prompt is too long, ContextFull ends it. Raises HeadraceError for bad ones."""
        defaults = self._loaded.generation_defaults
        sampling = SamplingParams(**sampling_settings(command.sampling, defaults, command.otherwise))
        started = time.perf_counter()
        prompt = self.fitting.fit(command, send)
        if prompt is None:
            return
        tokenize_s = time.perf_counter() - started
        tokenizer = self._loaded.tokenizer
        request = Request(
            prompt=prompt,
            max_tokens=command.max_tokens,
            sampling=sampling,
            stop_ids=tokenizer.eos_ids,
            cancel=cancel,
            speculate=speculation(command.speculate, draft=self._drafted),
        )
        text = AnswerText(tokenizer, request, command.stop)
        opening = "" if command.continue_text else self._prompts.opening(prompt)
        outbox = Outbox(command, send, opening)
        self._kept.bring_back(prompt)
        self._open[self._engine.submit(request)] = _Answering(command, text, outbox, tokenize_s)
        self._several = self._several or len(self._open) > 1

    def step(self, send: Send) -> None:
        """One step of all. Raises what `Engine.step` raises: then nothing is being answered any more, see `lost`."""
        batch = 0
        for sequence, event in self._engine.step():
            answering = self._open.get(sequence)
            if answering is None:  # it failed here
                continue
            try:
                part = answering.text.part(event)
            except Exception as error:
                self._failed(sequence, expected(error), send)
                continue
            if isinstance(part, TextChunk):
                batch = part.step.record.batch
                self._tokens += len(part.step.tokens)
                answering.outbox.add(part.text, part.step.record, part.guessed)
            elif isinstance(part, Completed):
                answering.outbox.add(part.text, part.finished.stop_record)
                answering.outbox.flush()
                del self._open[sequence]
                self._kept.said(sequence.tokens)
                send(self._done(answering, part.finished))
            else:
                send(Prefill(answering.command.id, part.done, part.total, part.reused))
        if self._several:
            if batch:
                self._batches.append(batch)
            if self._open or not self._engine.has_work:  # the last time, when what they held is given back
                self._tell(send)
        elif not self._open:
            self._tokens = 0

    def _failed(self, sequence: Sequence, error: HeadraceError, send: Send) -> None:
        """One request ends with its error; what it had said is there."""
        answering = self._open.pop(sequence)
        self._engine.cancel(sequence)
        answering.outbox.flush()
        send(Failed(answering.command.id, str(error), error.hint))

    def lost(self) -> list[int]:
        """The requests that were being answered when `step` raised: all of them."""
        ids = [answering.command.id for answering in self._open.values()]
        self._open.clear()
        self._all_over()
        return ids

    def _tell(self, send: Send) -> None:
        now = time.monotonic()
        if self._open and now - self._told_at < _SERVED_S:
            return
        self._told_at = now
        load = self._engine.load()
        states = {answering.command.id: sequence.state for sequence, answering in self._open.items()}
        batches, self._batches = tuple(self._batches), []
        kv = load.kv_used_bytes, load.kv_room_bytes, load.pool_bytes, load.blocks
        send(Served(states, self._tokens, now, batches, *kv))
        if not self._open:
            self._all_over()

    def _all_over(self) -> None:
        self._several, self._told_at = False, float("-inf")
        self._tokens = 0
        self._batches.clear()

    def _done(self, answering: _Answering, finished: Finished) -> Done:
        summary = finished.summary
        entries = summary.prompt_tokens - 1 + summary.steps + summary.accepted
        return Done(
            id=answering.command.id,
            reason=finished.reason,
            summary=summary,
            tokenize_s=answering.tokenize_s,
            ttft_s=answering.outbox.ttft_s,
            context_full=finished.reason == "length" and entries >= self._loaded.context_limit,
            mbu=self._mbu(summary),
        )
