"""Answers of one loaded model: prompts and options in, text events out.

    answer = answerer.prepare(answerer.encode("Why?"), AnswerOptions(max_tokens=9))
    for event in answerer.stream(answer): ...

For many at once, `submit` each prepared answer and call `step` while `has_work`. `submit`, `stream`, `step` and
`cancel_all` belong to the thread that loaded the model. `encode`, `prepare` and `prepare_grammars` may run on any
thread, several at once (`app.engine.preparation`): they do not change the engine.

Guards: tests/app/answer/test_answerer.py and test_structured.py; tests/app/engine/test_preparation.py and
tests/test_api_threads.py for the threads.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from headrace.app.answer import MAX_RUNNING
from headrace.app.answer.answer import Answer, EncodedPrompt, TextEvent
from headrace.app.answer.call import Messages
from headrace.app.answer.options import AnswerOptions, recommended_options
from headrace.models.loading.load import LoadedModel
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.events import Completed, Part
from headrace.models.text.thinking import Thinking
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag, Request, SequenceFailed
from headrace.runtime.engine.sequence import Sequence as EngineSequence
from headrace.runtime.errors import UsageError, expected
from headrace.runtime.metrics.telemetry import Summary
from headrace.runtime.network import Network
from headrace.runtime.sampling.constraint import Grammar
from headrace.runtime.sampling.params import random_seed
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import Speculation

if TYPE_CHECKING:
    from headrace.models.text.structured.grammars import Grammars, Thinks
    from headrace.models.text.tools.table import FormOfTools


class Answerer:
    """A loaded model, its chat template and its engine."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        draft: Network | None = None,
        keep_prefix: bool = False,
        max_running: int = MAX_RUNNING,
        kv_key: bytes = b"",
        own_processes: Sequence[int] = (),
        mbu: Callable[[Summary], float | None] = lambda _: None,
    ) -> None:
        """Make the model's engine.

        model: the loaded one.
        draft: a draft model's network, for speculative decoding.
        own_processes, mbu: see `Answer`.

        All others: see `Engine`.
        """
        self.model = model
        self.chat_prompt = ChatPrompt(model.tokenizer)
        self.engine = Engine(
            model.network,
            context_limit=model.context_limit,
            keep_prefix=keep_prefix,
            max_running=max_running,
            kv_key=kv_key,
            draft=draft,
            pass_costs=PassCostStore(model.network.cost),
        )
        self._drafted = draft is not None
        self._own_processes = own_processes
        self._mbu = mbu
        self._running: dict[EngineSequence, Answer] = {}

    def encode(
        self,
        prompt: str | Messages,
        *,
        thinking: Thinking | None = None,
        tools: ToolUse | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> EncodedPrompt:
        """Encode a conversation with the chat template, or a text to continue as it is.

        prompt: messages, or the text.
        thinking: on or off, a level or a budget; None: as the template has it.
        tools: those that the model may call, see `app.answer.tools`.
        variables: of the chat template.

        Raises UsageError, ContextLimitError and CheckpointError.
        """
        started = time.monotonic()
        if isinstance(prompt, str):
            ids = self.chat_prompt.continued(prompt)
            return EncodedPrompt(ids, started=started, tokenize_s=time.monotonic() - started)
        ids = self.chat_prompt.encode(prompt, thinking=thinking, tools=tools, variables=variables)
        opening = self.chat_prompt.opening(ids)
        return EncodedPrompt(
            ids,
            opening=opening,
            thinking=bool(opening),
            chat=True,
            tools=tools,
            started=started,
            tokenize_s=time.monotonic() - started,
        )

    def prepare(
        self,
        prompt: EncodedPrompt,
        options: AnswerOptions,
        *,
        logprobs: int | None = None,
        cancel: CancelFlag | None = None,
    ) -> Answer:
        """Make the request for an answer. Options that are not set are the model's recommendations.

        prompt: of `encode`.
        options: of this answer.
        logprobs: number of best tokens reported with their log probabilities; None: off.
        cancel: ends the answer once it is set.

        Raises UsageError for a schema or grammar that is wrong, or cannot be honoured wholly.
        """
        options = options.resolved(self._recommended)
        if options.seed is None:
            options = replace(options, seed=random_seed())

        # Tools that may be called, and the form in which this model writes their calls.
        tools = None
        form = None
        if prompt.tools is not None and prompt.tools.callable:
            tools = prompt.tools
            form = self._form_of(tools)
        grammar, unchecked = self._grammar(prompt, options, tools, form)

        request = Request(
            prompt=prompt.ids,
            max_tokens=options.max_tokens,
            sampling=options.sampling_params(),
            stop_ids=self.model.tokenizer.eos_ids,
            logprobs=logprobs,
            cancel=CancelFlag(cancel),  # the caller's flag may end several answers, a stop string only this one
            speculate=self._speculation(options.speculate),
            section=self.chat_prompt.section_limit(options.thinking, is_open=prompt.thinking),
            grammar=grammar,
        )

        calls = None
        if form is not None:
            is_certain = grammar is not None  # the grammar makes every beginning of a call a whole one
            calls = ToolStream(form.form, form.marks, thinking=prompt.thinking, certain=is_certain)
        return Answer(
            prompt,
            request,
            self.model.tokenizer,
            stop=options.stop or (),
            own_processes=self._own_processes,
            tools=calls,
            unchecked_tools=unchecked,
            mbu=self._mbu,
        )

    def stream(self, answer: Answer) -> Generator[Part, None, None]:
        """Generate one answer alone: the text events up to `Completed`. Closing the generator ends the generation.

        Raises the errors of `Engine.generate`.
        """
        for event in self.engine.generate(answer.request):
            yield answer.take(event)

    def submit(self, answer: Answer) -> EngineSequence:
        """Queue an answer; its text events come from `step`. Raises the errors of `Engine.submit`."""
        sequence = self.engine.submit(answer.request)
        self._running[sequence] = answer
        return sequence

    def step(self) -> list[tuple[Answer, TextEvent]]:
        """Make one step of all answers. An answer's own error comes as `SequenceFailed`, and ends that answer alone.

        Where it raises (see `Engine.step`), every answer is lost, and the answerer ready for others.
        """
        try:
            delivered = self.engine.step()
        except BaseException:  # Ctrl-C, too: no answer may be taken for a running one
            self._running.clear()
            raise
        events: list[tuple[Answer, TextEvent]] = []
        for sequence, event in delivered:
            answer = self._running.get(sequence)
            if answer is None:  # it failed in its text; the engine ends it with this step
                continue
            try:
                part: TextEvent = answer.take(event)
            except Exception as error:  # of a tokenizer, say: the others go on
                self.engine.cancel(sequence)
                part = SequenceFailed(expected(error))
            if isinstance(part, Completed | SequenceFailed):
                del self._running[sequence]
            events.append((answer, part))
        return events

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._running) or self.engine.has_work

    def cancel_all(self) -> None:
        """End all submitted answers without further events, and give their memory back."""
        for sequence in self._running:
            self.engine.cancel(sequence)
        self._running.clear()
        while self.engine.has_work:
            self.engine.step()

    def prepare_grammars(self) -> None:
        """Prepare the vocabulary for grammars, which takes up to a second, before the first of them."""
        with suppress(UsageError):  # raised again by an answer that needs it
            _ = self._grammars.trie.built

    # Cached: threads that ask for the first time at once may each compute the value. Each result is whole and equal to
    # the others, and the last one stays.

    @cached_property
    def _recommended(self) -> AnswerOptions:
        return recommended_options(self.model.generation_defaults)

    @cached_property
    def _grammars(self) -> "Grammars":
        from headrace.models.text.structured.grammars import Grammars  # late, as the forms: most answers need neither

        return Grammars(self.model.tokenizer, self.model.network.vocab_size)

    def _form_of(self, tools: ToolUse) -> "FormOfTools":
        from headrace.models.text.tools.table import form_of

        return form_of(self.model.tokenizer, tools)

    def _grammar(
        self, prompt: EncodedPrompt, options: AnswerOptions, tools: ToolUse | None, form: "FormOfTools | None"
    ) -> tuple[Grammar | None, dict[str, str]]:
        """Return the compiled grammar of an answer, after the thinking that its prompt leads to; None without any.

        With it, the tools whose calls it does not check, and the reasons.

        options: may have the grammar or the schema of a text.
        tools: that the model may call; None: none.
        form: of their calls.
        """
        source = options.grammar_source()

        # The grammar of calls. A text that the prompt has begun goes on as text, so there are none.
        calls = None
        unchecked: dict[str, str] = {}
        if tools is not None and form is not None and not prompt.begun:
            calls, unchecked = self._grammars.call_rules(tools, form.form)
        if source is None and calls is None:
            return None, unchecked

        # A schema leaves room for calls only if the grammar tells them from the text.
        if source is not None and tools is not None:
            if prompt.begun:
                raise UsageError(
                    "an answer that continues a text takes no tools with a schema", "leave out the schema or the tools"
                )
            if calls is None:
                raise UsageError("this model's tool calls look like text: a schema excludes tools")

        try:
            return self._grammars.compile(source, self._thinks(prompt, options), prompt.begun, calls), unchecked
        except UsageError as error:
            if source is not None or tools is None or calls is None or calls.forced:
                raise
            # The tools are too many for a grammar. Their calls are read, but nothing guarantees the arguments.
            return None, dict.fromkeys(tools.tools, str(error))

    def _thinks(self, prompt: EncodedPrompt, options: AnswerOptions) -> "Thinks":
        """Return which thinking precedes the text or calls of an answer."""
        if prompt.thinking:
            return "open"
        if not prompt.chat or prompt.begun or not self.chat_prompt.may_think(options.thinking):
            return "no"
        has_budget = isinstance(options.thinking, int) and not isinstance(options.thinking, bool)
        return "once" if has_budget else "may"

    def _speculation(self, choice: str | None) -> Speculation:
        if self._drafted and choice != "off":
            return "draft"
        return cast(Speculation, choice or "auto")
