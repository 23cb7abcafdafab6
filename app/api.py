"""The Python API; `headrace/__init__.py` lists its names.

Text is the model's, unsanitised: sanitise it before printing it on a terminal (`app.output.sanitise`). A `Model`
belongs to the thread that loaded it, and serves one call at a time. All errors are HeadraceErrors.
"""

import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack
from weakref import WeakSet

import mlx.core as mx

from headrace.app.answer.answer import Answer, Prompt
from headrace.app.answer.answer_stream import AnswerStream, require_thread
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.generation import Generation, generation, parsed_value, plain_schema
from headrace.app.answer.messages import read_messages
from headrace.app.answer.options import OPTIONS, AnswerOptions, recommended_options
from headrace.app.answer.tools import read_tools
from headrace.app.answer.value_types import Whole, read_value
from headrace.app.config.load_options import activations_choice, kv_choice
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.document import ENGINE
from headrace.app.predict.prediction import Prediction
from headrace.app.predict.prediction import predict as predict_shape
from headrace.app.predict.published import assumptions
from headrace.app.predict.targets import targets_for
from headrace.models.checkpoint.quantization import Quantization
from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.find_shape import find_shape
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.resolve import resolve
from headrace.runtime import ops
from headrace.runtime.config import environment
from headrace.runtime.engine.request import CancelFlag, Failed
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.sampling.params import SamplingParams

Message = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text}`; tool calls as in OpenAI's API."""


class OptionKeywords(TypedDict, total=False):
    """Options of an answer as keywords, named as for `run`; None: not set."""

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
    schema: Any
    regex: str | None
    grammar: str | None


class Keywords(OptionKeywords, total=False):
    """All keywords of an answer: options, tools as in OpenAI's chat API, and the number of best tokens reported."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    logprobs: int | None


class Model:
    """A loaded model. Its KV cache outlives an answer: only the new part of the next prompt is prefilled.

    sampling: the recommended parameters, the default of every answer. context_limit: tokens of prompt and answer.
    notes: facts about the loaded weights, such as a conversion. `close`, or the end of a `with` block, frees its
    memory.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._answerer: Answerer | None = Answerer(loaded, keep_prefix=True)
        self._thread = threading.get_ident()
        self._streams: WeakSet[AnswerStream] = WeakSet()
        self.name = loaded.name
        self.context_limit = loaded.context_limit
        self.notes = tuple(loaded.notes)
        self.sampling = recommended_options(loaded.generation_defaults).sampling_params()

    def __repr__(self) -> str:
        return f"<headrace.Model {self.name}, context limit {self.context_limit}>"

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End open answers and free the model's memory. Later calls raise EngineError; closing again does nothing."""
        if self._answerer is None:
            return
        require_thread(self._thread)
        for stream in list(self._streams):
            stream.close()
        self._answerer = None
        mx.clear_cache()

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        cancel: CancelFlag | None = None,
        **options: Unpack[Keywords],
    ) -> AnswerStream:
        """Answer a conversation with the model's chat template. A text alone is one user message.

        sampling: None means the model's own (`Model.sampling`); keywords such as `temperature` and `seed` go before it.
        stop: a text, or several, that end the answer and are left out of it. max_tokens: None means up to the context
        limit. thinking: on or off, a level, or a budget in tokens, where the model allows it. schema: a JSON schema, as
        an object or text, or a pydantic class; regex, grammar: a regular expression or a Lark grammar instead; the
        answer fits it, and the stream's `parsed` is its value. tools, tool_choice, parallel_tool_calls: as in OpenAI's
        chat API; calls come in `calls` of the parts. logprobs: number of best tokens that each step reports; 0: the
        chosen one alone. Closing the iterator ends the generation, as does `cancel`, which any thread may set, during
        prefill too.
        Raises UsageError for a malformed request or a missing chat template, ContextLimitError for a prompt that does
        not fit, CheckpointError for a broken chat template, EngineError for a closed model. Iterating raises
        EngineError while another answer is open or on another thread, and NotEnoughMemoryError.
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
        return self._stream(self._prepare(text, sampling, options, cancel), options.get("schema"))

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
        for _ in self._stream(answer):
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
        require_thread(self._thread)
        answerer = self._opened
        answers = [self._prepare(_prompt(each, raw=raw), sampling, options, None) for each in prompts]
        try:
            for answer in answers:
                answerer.submit(answer)
            while answerer.has_work:
                for _, event in answerer.step():
                    if isinstance(event, Failed):
                        raise event.error
                if cancel:
                    for answer in answers:
                        answer.request.cancel.set()
        finally:
            answerer.cancel_all()
        return [generation(answer, options.get("schema")) for answer in answers]

    def count_tokens(self, text: str | Sequence[Message]) -> int:
        """Count the tokens of a text, or of the prompt that `chat` makes of messages. Errors as for `chat`."""
        if isinstance(text, str):
            return len(self._opened.model.tokenizer.encode(text))
        return len(self._opened.encode(text).ids)

    @property
    def _opened(self) -> Answerer:
        if self._answerer is None:
            raise EngineError(f"{self.name} is closed", "load it again")
        return self._answerer

    def _prepare(
        self,
        prompt: str | Sequence[Message],
        sampling: SamplingParams | None,
        keywords: Keywords,
        cancel: CancelFlag | None,
    ) -> Answer:
        given = {name: value for name, value in keywords.items() if name in OPTIONS}
        if (unknown := next((name for name in keywords if name not in Keywords.__annotations__), None)) is not None:
            given[unknown] = None  # refused by name
        options = AnswerOptions.of({**given, "schema": plain_schema(keywords.get("schema"))})
        tools = read_tools(keywords.get("tools"), keywords.get("tool_choice"), keywords.get("parallel_tool_calls"))
        if isinstance(prompt, str) and (options.thinking is not None or tools is not None):
            raise UsageError(f"{'tools' if tools else 'thinking'} needs a conversation, not a text to continue")
        logprobs = None if keywords.get("logprobs") is None else read_value(Whole(), "logprobs", keywords["logprobs"])
        encoded: Prompt = self._opened.encode(prompt, thinking=options.thinking, tools=tools)
        chosen = options.over(AnswerOptions.of_sampling(self.sampling if sampling is None else sampling))
        return self._opened.prepare(encoded, chosen, logprobs=logprobs, cancel=cancel)

    def _stream(self, answer: Answer, schema: object = None) -> AnswerStream:
        stream = AnswerStream(self._opened.stream(answer), self._thread, lambda: parsed_value(answer, schema))
        self._streams.add(stream)
        return stream


def load(
    name: str | None = None,
    *,
    context: int | None = None,
    quantize: int | None = None,
    group_size: int = 64,
    kv: str = "f16",
    activations: str = "16",
    force: bool = False,
    progress: Progress = silent,
) -> Model:
    """Load a model: a catalog name, a directory, a .gguf file or a hub id; None: the default. Fetched if need be.

    context: limit in tokens; None: the model's, as memory allows. quantize: bits to quantize a plain checkpoint to
    while loading, in groups of `group_size`. kv: K/V format, "f16", "q8", "k8v4" or "q4", or "auto" for the first of
    these in which the context fits. activations: of prompts, "16", "8" or "auto" bits. force: go beyond the memory
    limit, or with `context` the model's.
    progress(stage, done, total): called during long work. Warns (RuntimeWarning) if the native kernels are missing.
    Raises ModelNotFoundError, FetchError, CheckpointError, NotEnoughMemoryError and UsageError.
    """
    requantize = Quantization(quantize, group_size) if quantize is not None else None  # refused before any fetch
    kv_format, rounding = kv_choice(kv), activations_choice(activations)
    resolved = resolve(name, progress=progress)
    _warn_of_slow_kernels()
    how: dict[str, Any] = {"context": context, "kv": kv_format, "activations": rounding, "force": force}
    return Model(load_resolved(resolved, requantize=requantize, **how))


def predict(
    name: str | None = None,
    *,
    chip: str | None = None,
    memory_gb: int | None = None,
    context: int = DEFAULT_CONTEXT,
    batch: int = 1,
) -> Prediction:
    """Predict decode speed with `context` tokens in the cache, and memory, from shapes; no weights are loaded.

    name: as for `load`; for a model that is not installed only its config is fetched. chip: such as "M4 Max (40-core)",
    with `memory_gb` of memory; None: this machine, measured first if need be. batch: sequences that share a step; the
    speed is their total.
    Raises ModelNotFoundError, UnsupportedModelError, CheckpointError, FetchError, and UsageError for an unknown chip.
    """
    _, shape = find_shape(name)
    target = targets_for((chip,) if chip else (), memory_gb, others=False)[0]
    return predict_shape(shape, target, assumptions(ENGINE), context, batch)


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    """Return a conversation, results with the names of tools. Raises UsageError for a result without a call."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    used = any(isinstance(one, Mapping) and (one.get("role") == "tool" or one.get("tool_calls")) for one in messages)
    return read_messages([dict(one) for one in messages], strict=True) if used else messages


def _prompt(messages: str | Sequence[Message], *, raw: bool) -> str | Sequence[Message]:
    if raw and not isinstance(messages, str):
        raise UsageError("raw continues a text, not a conversation", "use complete's text, or leave out raw")
    return messages if raw else _messages(messages)


def _warn_of_slow_kernels() -> None:
    """Warn if the native kernels are missing on a CPU, where they are several times as fast."""
    chosen = ops.describe()
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and chosen["kernels"] == ops.reference.name and not environment.reference_kernels():
        problem = f"headrace runs slow stock MLX operations on this CPU: {chosen['reason']}"
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
