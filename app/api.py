"""The Python API; `headrace/__init__.py` lists its names.

Text is the model's, unsanitised: sanitise it before printing it on a terminal (`app.output.sanitise`). A `Model` has a
thread of its own, and serves calls of any thread and task in one batch. All errors are HeadraceErrors.

Guards: tests/test_api.py, test_api_service.py and test_api_threads.py.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from os import PathLike, fspath
from queue import SimpleQueue
from typing import TypedDict, Unpack
from weakref import finalize

import mlx.core as mx

from headrace.app.answer import MAX_RUNNING
from headrace.app.answer.answer import Answer, EncodedPrompt
from headrace.app.answer.answer_stream import AnswerStream
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.engine_thread import EngineThread
from headrace.app.answer.generation import Generation, generation, plain_schema
from headrace.app.answer.messages import read_messages
from headrace.app.answer.open_answer import AnswerPart, OpenAnswer, wait_for_item
from headrace.app.answer.options import OPTIONS, AnswerOptions, recommended_options
from headrace.app.answer.tools import read_tools
from headrace.app.config.load_options import activations_choice, kv_choice
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.prediction import Prediction
from headrace.app.predict.prediction import predict as predict_shape
from headrace.app.predict.targets import targets_for
from headrace.models.loading.load import LoadedModel, LoadOptions, load_resolved
from headrace.models.registry.adapters import split_adapter
from headrace.models.registry.find_shape import find_shape
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.resolve import DEFAULT_MODEL, resolve
from headrace.runtime import ops
from headrace.runtime.config import environment
from headrace.runtime.config.value_types import Flag, Whole, read_value, shown
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import EngineError, HeadraceError, UsageError
from headrace.runtime.sampling.params import SamplingParams

_SUBMITTED = 2 * MAX_RUNNING  # prompts of a batch in the engine at a time: answers of other calls wait for no more

Message = Mapping[str, object]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text}`; tool calls as in OpenAI's API."""


class OptionKeywords(TypedDict, total=False):
    """Options of an answer as keywords, named as for `run`; None: not set.

    They have to be those of `OPTIONS`, in the same order: tests/test_api.py compares them.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    speculate: str | None
    thinking: bool | int | str | None
    chat_template_kwargs: Mapping[str, object] | None
    schema: object
    regex: str | None
    grammar: str | None


class Keywords(OptionKeywords, total=False):
    """All keywords of an answer: options, tools as in OpenAI's chat API, and the number of best tokens reported."""

    tools: Sequence[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    logprobs: int | None


class Model:
    """A loaded model. Its KV cache outlives an answer: only the new part of the next prompt is prefilled.

    Any thread and any task may call it. Answers that are open at the same time are decoded in one batch, up to 16; more
    wait for their turn. A thread of the model computes; it is no part of a process that is forked later.
    `close`, or the end of a `with` block, frees its memory.

    name: as it is shown, without a path.
    sampling: the recommended parameters, the default of every answer.
    context_limit: tokens of prompt and answer.
    notes: facts about the loaded weights, such as a conversion.
    """

    def __init__(self, name: str, load: Callable[[], LoadedModel]) -> None:
        """Call `load` on the model's thread. name: for errors of the thread."""
        self._engine = EngineThread(name, lambda: Answerer(load(), keep_prefix=True))
        # Dropped without `close`: the thread ends later. Nothing to do at exit, where all threads are ended.
        finalize(self, self._engine.stop).atexit = False
        loaded = self._opened.model
        self.name = loaded.name
        self.context_limit = loaded.context_limit
        self.notes = tuple(loaded.notes)
        self.sampling = recommended_options(loaded.generation_defaults).sampling_params()

    def __repr__(self) -> str:
        state = f"{self._engine.open_answers} open answers"
        if self._engine.answerer is None:
            state = "closed"
        return f"<headrace.Model {self.name}: context limit {self.context_limit}, {state}>"

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End open answers with an EngineError, and return when the memory is free. Closing again does nothing.

        Later calls raise EngineError.
        """
        self._engine.close()

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        cancel: CancelFlag | None = None,
        **options: Unpack[Keywords],
    ) -> AnswerStream:
        """Answer a conversation with the model's chat template. A text alone is one user message.

        The prompt is encoded on the calling thread; the answer begins before it is read.

        sampling: None means the model's own (`Model.sampling`); keywords such as `temperature` and `seed` go before it.
        cancel: ends the answer, as closing the stream does, during prefill too. Any thread may set it.
        stop: a text, or several, that end the answer and are left out of it.
        max_tokens: None means up to the context limit.
        thinking: on or off, a level, or a budget in tokens, where the model allows it.
        schema: a JSON schema, as an object or text, or a pydantic class. The answer fits it, and the stream's `parsed`
            is its value.
        regex, grammar: a regular expression or a Lark grammar instead of a schema.
        tools, tool_choice, parallel_tool_calls: as in OpenAI's chat API; calls come in `calls` of the parts.
        logprobs: number of best tokens that each step reports; 0: the chosen one alone.

        Raises UsageError for a malformed request or a missing chat template, ContextLimitError for a prompt that does
        not fit, CheckpointError for a broken chat template, EngineError for a closed model. Iterating raises
        NotEnoughMemoryError, and EngineError for an answer that failed or was open when the model was closed.
        """
        return self._stream(self._prepare(_messages(messages), sampling, options, cancel), options.get("schema"))

    def complete(
        self,
        text: str,
        *,
        sampling: SamplingParams | None = None,
        cancel: CancelFlag | None = None,
        **options: Unpack[Keywords],
    ) -> AnswerStream:
        """Continue a plain text, without a chat template. Arguments and errors as for `chat`, without tools."""
        return self._stream(self._prepare(_prompt(text, raw=True), sampling, options, cancel), options.get("schema"))

    def generate(
        self,
        messages: str | Sequence[Message],
        *,
        raw: bool = False,
        sampling: SamplingParams | None = None,
        cancel: CancelFlag | None = None,
        **options: Unpack[Keywords],
    ) -> Generation:
        """Return the whole answer of `chat`, or with `raw` of `complete`. Arguments and errors as there.

        Raises EngineError for an answer with a schema that a limit cut.
        """
        answer = self._prepare(_prompt(messages, raw=raw), sampling, options, cancel)
        for _ in self._stream(answer, in_parts=False):
            pass
        return generation(answer, options.get("schema"))

    async def agenerate(
        self,
        messages: str | Sequence[Message],
        *,
        raw: bool = False,
        sampling: SamplingParams | None = None,
        cancel: CancelFlag | None = None,
        **options: Unpack[Keywords],
    ) -> Generation:
        """Return the whole answer of `generate` to a task; others run meanwhile. Cancelling the task ends the answer.

        Arguments and errors as for `generate`. The prompt is encoded on a thread of the event loop's executor.
        """
        from asyncio import to_thread

        prompt = _prompt(messages, raw=raw)
        answer = await to_thread(self._prepare, prompt, sampling, options, cancel)
        async for _ in self._stream(answer, in_parts=False):
            pass
        return generation(answer, options.get("schema"))

    def batch(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        raw: bool = False,
        sampling: SamplingParams | None = None,
        cancel: CancelFlag | None = None,
        **options: Unpack[Keywords],
    ) -> list[Generation]:
        """Return the answers to many prompts, in their order; they are decoded together, each as if it were alone.

        Arguments and errors as for `generate`. All prompts are checked before the first answer.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise UsageError(f"prompts must be a list of texts or conversations, not {shown(prompts)}")
        given = [_prompt(each, raw=raw, name=f"prompts[{index}]") for index, each in enumerate(prompts)]
        answers = [self._prepare(each, sampling, options, cancel) for each in given]
        parts: SimpleQueue[AnswerPart | None] = SimpleQueue()
        opened = [OpenAnswer(answer, in_parts=False, parts=parts) for answer in answers]
        waiting = iter(opened)
        try:
            for each in islice(waiting, _SUBMITTED):
                self._engine.submit(each)
            for _ in opened:  # one end for each, of any of them: `parts` is shared
                if isinstance(end := wait_for_item(parts), HeadraceError):
                    raise end
                for each in islice(waiting, 1):
                    self._engine.submit(each)
        finally:
            for each in opened:
                each.close()
            self._engine.wake()
        return [generation(answer, options.get("schema")) for answer in answers]

    def count_tokens(self, text: str | Sequence[Message]) -> int:
        """Count the tokens of a text, or of the prompt that `chat` makes of messages. Errors as for `chat`."""
        if isinstance(text, str):
            return len(self._opened.model.tokenizer.encode(text))
        return len(self._opened.encode(_messages(text)).ids)

    def token_text(self, token: int) -> str:
        """Return the text of a token, such as one of a step's `logprobs`; bytes of a part of a character as U+FFFD."""
        tokenizer = self._opened.model.tokenizer
        return tokenizer.token_text(read_value(Whole(0, tokenizer.vocab_size - 1), "token", token))

    @property
    def _opened(self) -> Answerer:
        """The answerer, to encode prompts and prepare answers. Raises EngineError once closed."""
        if (answerer := self._engine.answerer) is None:
            raise EngineError(f"{self.name} is closed", "load it again")
        return answerer

    def _prepare(
        self,
        prompt: str | Sequence[Message],
        sampling: SamplingParams | None,
        keywords: Keywords,
        cancel: CancelFlag | None,
    ) -> Answer:
        _check_type("sampling", sampling, SamplingParams)
        _check_type("cancel", cancel, CancelFlag)
        given = {name: value for name, value in keywords.items() if name in OPTIONS}
        unknown = [name for name in keywords if name not in Keywords.__annotations__]
        given |= dict.fromkeys(unknown)  # `AnswerOptions.read` refuses them by name
        options = AnswerOptions.read({**given, "schema": plain_schema(keywords.get("schema"))})
        tools = read_tools(keywords.get("tools"), keywords.get("tool_choice"), keywords.get("parallel_tool_calls"))
        if isinstance(prompt, str):
            for name, value in (("tools", tools), ("thinking", options.thinking)):
                if value is not None:
                    raise UsageError(f"{name} needs a conversation, not a text to continue")
        logprobs = keywords.get("logprobs")
        if logprobs is not None:
            logprobs = read_value(Whole(), "logprobs", logprobs)
        answerer = self._opened
        variables = options.chat_template_kwargs
        encoded: EncodedPrompt = answerer.encode(prompt, thinking=options.thinking, tools=tools, variables=variables)
        if sampling is None:
            chosen = options.resolved(AnswerOptions.of_sampling(self.sampling))
        else:
            chosen = options.over(AnswerOptions.of_sampling(sampling))
        answer = answerer.prepare(encoded, chosen, logprobs=logprobs, cancel=cancel)
        answerer.engine.check(answer.request)
        return answer

    def _stream(self, answer: Answer, schema: object = None, *, in_parts: bool = True) -> AnswerStream:
        opened = OpenAnswer(answer, in_parts=in_parts)
        self._engine.submit(opened)
        return AnswerStream(opened, self._engine, self, schema)


def load(
    name: str | PathLike[str] | None = None,
    *,
    adapter: str | PathLike[str] | None = None,
    context: int | None = None,
    kv: str = "f16",
    activations: str | int = "16",
    force: bool = False,
    progress: Progress = silent,
) -> Model:
    """Load a model: a catalog name, a directory, a .gguf file or a hub id; None: the default. Fetched if need be.

    Any thread may load, and any may use the model. In a task: `await asyncio.to_thread(load, ...)`.

    adapter: LoRA adapter of the model: a folder, a .gguf file or a hub id; name "BASE+ADAPTER" means the same.
    context: limit in tokens; None: the model's, as memory allows.
    kv: K/V format, "f16", "q8", "k8v4" or "q4", or "auto" for the first of these in which the context fits.
    activations: of prompts, "16", "8" or "auto" bits.
    force: go beyond the memory limit, or with `context` the model's.
    progress: `progress(stage, done, total)` is called during long work.

    Warns (RuntimeWarning) if the native kernels are missing.
    Raises ModelNotFoundError, FetchError, CheckpointError, NotEnoughMemoryError and UsageError.
    """
    # Refused before any fetch.
    kv_format = kv_choice(kv)
    rounding = activations_choice(str(activations))
    if context is not None:
        context = _whole("context", context)
    force = read_value(Flag(), "force", force)
    if not callable(progress):
        raise UsageError(f"progress must be a function, not {shown(progress)}")
    resolved = resolve(_name_with_adapter(_model_name(name), adapter), progress=progress)
    _warn_of_slow_kernels()
    options = LoadOptions(context=context, kv=kv_format, activations=rounding, force=force, progress=progress)
    return Model(resolved.name, lambda: load_resolved(resolved, **options))


def predict(
    name: str | PathLike[str] | None = None,
    *,
    chip: str | None = None,
    memory_gb: int | None = None,
    context: int = DEFAULT_CONTEXT,
    batch: int = 1,
) -> Prediction:
    """Predict decode speed with `context` tokens in the cache, and memory, from shapes; no weights are loaded.

    name: as for `load`; for a model that is not installed no weights are fetched.
    chip: such as "M4 Max (40-core)"; None: this machine, measured first if need be.
    memory_gb: memory of the chip; None: that of this machine, or the largest sold.
    context: tokens in the cache of each sequence.
    batch: sequences that share a step; the speed is their total.
    Raises ModelNotFoundError, UnsupportedModelError, CheckpointError, FetchError, and UsageError for an unknown chip
    and for one with several variants.
    """
    _check_type("chip", chip, str)
    if memory_gb is not None:
        memory_gb = _whole("memory_gb", memory_gb)
    context = _whole("context", context, least=0)
    batch = _whole("batch", batch)
    _, shape = find_shape(_model_name(name))
    chips = (chip,) if chip else ()
    targets = targets_for(chips, memory_gb, others=False)
    if chip and len(targets) > 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError(f"chip {chip!r} has several variants: {names}", "name one of them, or give memory_gb")
    return predict_shape(shape, targets[0], context, batch)


def _prompt(given: str | Sequence[Message], *, raw: bool, name: str = "messages") -> str | Sequence[Message]:
    """Return a conversation, or with `raw` a text to continue. Raises UsageError. name: of the argument."""
    if not raw:
        return _messages(given, name)
    if not isinstance(given, str):
        raise UsageError(f"a raw prompt must be a text, not {shown(given)}", "chat and generate take messages")
    return given


def _messages(given: str | Sequence[Message], name: str = "messages") -> Sequence[Message]:
    """Return a conversation, contents as texts, results with the names of tools. Raises UsageError.

    name: of the argument, for errors.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise UsageError(f"{name} must be a text or a list of messages, not {shown(given)}")
    messages = [dict(each) if isinstance(each, Mapping) else each for each in given]
    return read_messages(messages, strict=True, where=name)


def _text_or_path(value: object, what: str) -> str | None:
    """Return a text or a path as a text; None for None. Raises UsageError for others and an empty one.

    what: the value is, for errors.
    """
    if value is None:
        return None
    if isinstance(value, PathLike):
        value = fspath(value)
    if value == "":
        raise UsageError(f"{what} is empty", "leave it out, or pass None")
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a text or a path, not {shown(value)}")
    return value


def _model_name(name: object) -> str | None:
    return _text_or_path(name, "the name of a model")


def _name_with_adapter(name: str | None, adapter: object) -> str | None:
    """Return BASE+ADAPTER; the name itself without an adapter. Raises UsageError for a model that has one."""
    after_plus = _text_or_path(adapter, "adapter")
    if after_plus is None:
        return name
    base = name or DEFAULT_MODEL
    if split_adapter(base)[1] is not None:
        raise UsageError(f"adapter: {base} has an adapter already", "name its base model")
    return f"{base}+{after_plus}"


def _whole(name: str, value: object, *, least: int = 1) -> int:
    return read_value(Whole(least), name, value)


def _check_type(name: str, value: object, kind: type) -> None:
    """Raise UsageError for a value of another type; None is allowed."""
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{name} must be a {kind.__name__}, not {shown(value)}")


def _warn_of_slow_kernels() -> None:
    """Warn if the native kernels are missing on a CPU, where they are several times as fast."""
    chosen = ops.describe()
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and chosen["kernels"] == ops.reference.name and not environment.reference_kernels():
        problem = f"headrace runs slow stock MLX operations on this CPU: {chosen['reason']}"
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
