"""The Python API; `headrace/__init__.py` lists its names.

Text is the model's, unsanitised: sanitise it before printing it on a terminal (`app.output.sanitise`). A `Model`
belongs to the thread that loaded it, and answers one prompt at a time. All errors are HeadraceErrors.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing

from headrace.app.answer.answer import Prompt
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.options import AnswerOptions, recommended_options
from headrace.app.config.kv_option import kv_choice
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
from headrace.models.text.answer import Completed, Part, TextChunk
from headrace.runtime.engine.request import CancelFlag, PrefillProgress
from headrace.runtime.errors import EngineError
from headrace.runtime.sampling.params import SamplingParams

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

Answer = Generator[TextChunk | Completed, None, None]
"""Parts with a `text` each: one `TextChunk` per decode step, then one `Completed` with the remaining text."""


class Model:
    """A loaded model. Its KV cache outlives an answer: only the new part of the next prompt is prefilled."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._answerer = Answerer(loaded, keep_prefix=True)
        self._thread = threading.get_ident()
        self.name = loaded.name
        self.context_limit = loaded.context_limit  # tokens, prompt and answer together
        self.sampling = recommended_options(loaded.generation_defaults).sampling_params()

    def __repr__(self) -> str:
        return f"<headrace.Model {self.name}, context limit {self.context_limit}>"

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        thinking: bool | None = None,
        cancel: CancelFlag | None = None,
    ) -> Answer:
        """Answer a conversation with the model's chat template. A text alone is one user message.

        sampling: None means the model's own (`Model.sampling`). stop: texts that end the answer and are left out of it.
        thinking: thinking of reasoning models, on or off where they allow it. Closing the iterator ends the generation,
        as does `cancel`, which any thread may set, during prefill too.
        Raises UsageError for a malformed request or a missing chat template, ContextLimitError for a prompt that does
        not fit. Iterating raises EngineError while another answer is open.
        """
        prompt = self._answerer.encode(_messages(messages), thinking=thinking)
        return self._answer(prompt, max_tokens, sampling, stop, cancel)

    def complete(
        self,
        text: str,
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        cancel: CancelFlag | None = None,
    ) -> Answer:
        """Continue a plain text, without a chat template. Arguments and errors as for `chat`."""
        return self._answer(self._answerer.encode(text), max_tokens, sampling, stop, cancel)

    def count_tokens(self, text: str | Sequence[Message]) -> int:
        """Count the tokens of a text, or of the prompt that `chat` makes of messages."""
        if isinstance(text, str):
            return len(self._answerer.model.tokenizer.encode(text))
        return len(self._answerer.encode(text).ids)

    def _answer(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        sampling: SamplingParams | None,
        stop: Sequence[str],
        cancel: CancelFlag | None,
    ) -> Answer:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        chosen = AnswerOptions.of_sampling(self.sampling if sampling is None else sampling)
        options = AnswerOptions(max_tokens=max_tokens, stop=stops).over(chosen)
        return self._parts(self._answerer.stream(self._answerer.prepare(prompt, options, cancel=cancel)))

    def _parts(self, parts: Generator[Part, None, None]) -> Answer:
        if threading.get_ident() != self._thread:
            raise EngineError("a model answers on the thread that loaded it", "load and use it on one thread")
        with closing(parts):
            for part in parts:
                if not isinstance(part, PrefillProgress):
                    yield part


def load(
    name: str | None = None,
    *,
    context: int | None = None,
    quantize: int | None = None,
    group_size: int = 64,
    kv: str = "f16",
    force: bool = False,
    progress: Progress = silent,
) -> Model:
    """Load a model: a catalog name, a directory, a .gguf file or a hub id; None: the default. Fetched if need be.

    context: limit in tokens; None: the model's, as memory allows. quantize: bits to quantize a plain checkpoint to
    while loading, in groups of `group_size`. kv: K/V format, "f16", "q8", "k8v4" or "q4", or "auto" for the first of
    these in which the context fits. force: go beyond the memory limit, or with `context` the model's.
    progress(stage, done, total): called during long work.
    Raises ModelNotFoundError, FetchError, CheckpointError, NotEnoughMemoryError and UsageError.
    """
    requantize = Quantization(quantize, group_size) if quantize is not None else None  # refused before any fetch
    kv_format = kv_choice(kv)
    resolved = resolve(name, progress=progress)
    return Model(load_resolved(resolved, context=context, requantize=requantize, kv=kv_format, force=force))


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
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
