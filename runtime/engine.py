"""The engine: requests in, events out, one at a time, on the thread that loaded the network.

MLX streams and compiled functions belong to a thread, so an engine is used from one thread for life; only a
request's `CancelFlag` may be touched from elsewhere. After any end (finished, cancelled, closed, failed) the next
request may come, and the cache's memory is released, unless `keep_prefix` holds on to it for the next prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

from headrace.runtime.cache import Cache
from headrace.runtime.decode import SampledToken, decode
from headrace.runtime.errors import ContextLimitError, EngineError, UsageError
from headrace.runtime.machine.memory import POOL, wired
from headrace.runtime.machine.out_of_memory import memory_errors
from headrace.runtime.network import Network
from headrace.runtime.prefill import ChunkSizer, prefill
from headrace.runtime.prefix import Prefix
from headrace.runtime.request import Event, Finished, FinishReason, PrefillProgress, Request, Step, TokenLogprobs
from headrace.runtime.sampling import Sampler, logprobs
from headrace.runtime.timeline import Timeline

OPENING = 16  # tokens: as many as templates open an answer with, or a few more


class Engine:
    """Runs one network. `context_limit` bounds the cache entries of a generation: an answer's last token needs none.

    keep_prefix: a conversation. The cache outlives its request, and of the next prompt only what is new is prefilled.
    """

    def __init__(self, network: Network[Any], *, context_limit: int, keep_prefix: bool = False) -> None:
        self.network = network
        self.context_limit = context_limit
        self.prefix = Prefix() if keep_prefix else None
        self._cost = network.cost
        self._chunk_sizer = ChunkSizer()
        mx.set_cache_limit(POOL)
        self._busy = False

    def generate(self, request: Request) -> Iterator[Event]:
        """Answer a request: prefill progress, one `Step` per token, then exactly one `Finished`.

        Raises UsageError for an empty prompt or ids outside the vocabulary, ContextLimitError for a prompt longer
        than the context limit, EngineError while another generation is open, NotEnoughMemoryError where the device's
        memory runs out on the way.
        """
        self._claimable()
        self._check(request)
        return self._generate(request)

    def read_ahead(self, prompt: Sequence[int], stop: Callable[[], bool]) -> Cache | None:
        """Prefill what the next prompt is expected to begin with, while nobody waits for an answer.

        Ends early, with nothing lost, once `stop()` says so between two chunks. Gives the kept cache as it is then;
        None, and nothing done, without `keep_prefix`. Raises what `generate` raises.
        """
        self._claimable()
        self._check(Request(prompt))
        if self.prefix is None:
            return None
        with self._working():
            cache = self.prefix.take(prompt) or self.network.make_cache(self.context_limit)
            for _ in self._read(cache, prompt):
                if stop():
                    break
            self.prefix.keep(cache, prompt)
            return cache

    def _claimable(self) -> None:
        if self._busy:
            raise EngineError("the engine is already generating", "close the other generation first")

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise UsageError("the prompt is empty")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise UsageError("max tokens must be at least 1")
        if min(request.prompt) < 0 or max(request.prompt) >= self.network.vocab_size:
            raise UsageError(f"the prompt has token ids outside the vocabulary of {self.network.vocab_size}")
        if len(request.prompt) > self.context_limit:
            raise ContextLimitError(
                f"the prompt has {len(request.prompt)} tokens, the context limit is {self.context_limit}",
                "shorten the prompt",
            )

    def _generate(self, request: Request) -> Iterator[Event]:
        self._claimable()  # again: another generation may have started since this one was made
        with self._working():
            yield from self._answer(request)

    @contextmanager
    def _working(self) -> Iterator[None]:
        weights, kv = self._cost.weight_bytes, self._cost.kv_bytes(self.context_limit)
        with memory_errors(weights), wired(weights, kv):
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                # clear_cache waits for the device with the interpreter lock held, which would stop every other thread
                # for the rest of the step that was built ahead: wait for that one without the lock first.
                mx.synchronize()
                mx.clear_cache()  # the K/V buffers went with `_answer`'s frame, unless they are kept

    def _answer(self, request: Request) -> Iterator[Event]:
        mx.reset_peak_memory()
        # First, since it may refuse the request, which must not cost a kept prefix.
        sampler = Sampler(request.sampling, vocab_size=self.network.vocab_size, prompt=request.prompt)
        kept = self.prefix.take(request.prompt) if self.prefix else None
        timeline = Timeline(
            cost=self._cost,
            prompt_tokens=len(request.prompt),
            reused_tokens=kept.committed if kept else 0,
        )
        cache = kept or self.network.make_cache(self.context_limit)
        sequence = list(request.prompt)  # and every token read since; its first `cache.committed` are in the cache
        try:
            yield from self._prefill(request, cache)
            timeline.prefill_done()
            yield from self._decode(request, cache, sampler, timeline, sequence)
        except GeneratorExit:  # closed between two events; after an error the cache is not to be trusted
            self._keep(cache, sequence)
            raise
        self._keep(cache, sequence)

    def _keep(self, cache: Cache, sequence: Sequence[int]) -> None:
        if self.prefix:
            self.prefix.keep(cache, sequence)

    def _prefill(self, request: Request, cache: Cache) -> Iterator[Event]:
        reused = cache.committed
        total = len(request.prompt) - 1 - reused
        if reused:
            yield PrefillProgress(0, total, reused)
        for done in self._read(cache, request.prompt):
            yield PrefillProgress(done - reused, total, reused)
            if request.cancel:
                return

    def _read(self, cache: Cache, prompt: Sequence[int]) -> Iterator[int]:
        """Prefill what the cache lacks of the prompt but its last token; how far it is, after each chunk.

        In a conversation, with marks to come back to where the cache needs them: also a little before the end, since
        what opens this answer may not be what opens it in the next prompt (a template that drops the thinking).
        """
        marks = self.prefix is not None and cache.needs_marks
        end = len(prompt) - 1
        for stop in (max(0, end - OPENING), end) if marks else (end,):
            for _ in prefill(self.network, cache, prompt[cache.committed : stop], self._chunk_sizer):
                if marks:
                    cache.mark()
                yield cache.committed

    def _decode(
        self, request: Request, cache: Cache, sampler: Sampler, timeline: Timeline, sequence: list[int]
    ) -> Iterator[Event]:
        reason: FinishReason = "length"
        stop_id, stop_record, said = None, None, 0
        room = self.context_limit - cache.length  # every step appends one entry
        steps = room if request.max_tokens is None else min(room, request.max_tokens)
        if request.cancel:
            yield Finished("cancelled", timeline.summary(cache, said))
            return

        def sample(logits: mx.array) -> SampledToken:
            token = sampler(logits)
            top = request.logprobs
            return SampledToken(token, None if top is None else logprobs(logits, token, top))

        last = mx.array([request.prompt[-1]])
        tokens = decode(self.network, cache, sample, last, steps)
        try:
            for sampled in tokens:
                token = cast(int, sampled.token.item())  # waits for the device
                cache.commit(1)
                sequence.append(token)
                record = timeline.step_done(cache)
                if token in request.stop_ids:
                    reason, stop_id, stop_record = "stop", token, record
                    break
                said += 1
                yield Step(token, record, _read(sampled))
                if request.cancel:
                    reason = "cancelled"
                    break
        finally:
            tokens.close()
        yield Finished(reason, timeline.summary(cache, said), stop_id, stop_record)


def _read(sampled: SampledToken) -> TokenLogprobs | None:
    if sampled.logprobs is None:
        return None
    chosen, ids, values = sampled.logprobs
    best = zip(cast(list[int], ids[0].tolist()), cast(list[float], values[0].tolist()), strict=True)
    return TokenLogprobs(cast(float, chosen.item()), list(best))
