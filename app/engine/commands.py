"""Commands from the chat or the server to its engine process.

`client.EngineClient` sends them, `Quit` through its `link.EngineLink`. `process.Inbox` takes Cancel, TimeSteps and
LimitKV as they arrive; `process.CommandLoop` runs all others. `ModelSpec` is one, too: it loads a model.

Guard: tests/app/engine/test_client.py.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.models.text.thinking import NO_TEXT, TextByKind, Thinking

if TYPE_CHECKING:  # the chat's first frame does not import it
    from headrace.models.text.tools.use import ToolUse

TIMED_EVERY = 16
"""One decode step in so many is timed by part, unless `TimeSteps` asks for others."""
_UNSET = AnswerOptions()


class Generate(Struct, frozen=True):
    """Answer a conversation, or continue a text; submitted requests are answered in one batch.

    id: of the generation, which its events name.
    messages: `{"role": ..., "content": ...}`, the system message first.
    options: of the answer; the model's recommendations replace unset ones.
    prompt: a text to continue as it is, instead of messages.
    suffix: the text after the gap that a continued text ends at.
    tools: that the model may call.
    logprobs: best tokens reported with each token; None: off.
    begun: the answer so far; the deltas continue it.
    drop_oldest: leave out the oldest turns of a too long prompt, with a `Dropped` event, instead of ending with
        `ContextFull`.
    explain: send the prompt as the model gets it.
    submitted: monotonic clock.
    """

    id: int
    messages: Sequence[Mapping[str, object]] = ()
    options: AnswerOptions = _UNSET
    prompt: str | None = None
    suffix: str | None = None
    tools: "ToolUse | None" = None
    logprobs: int | None = None
    begun: TextByKind = NO_TEXT
    drop_oldest: bool = False
    explain: bool = False
    submitted: float = field(default_factory=time.monotonic)


class CountTokens(Struct, frozen=True):
    """Count the tokens of a prompt (`TokensCounted`).

    id: of the count, which its event names.
    messages, tools: see `Generate`.
    thinking: see `AnswerOptions`.
    variables: of the chat template.
    """

    id: int
    messages: Sequence[Mapping[str, object]]
    thinking: Thinking | None = None
    tools: "ToolUse | None" = None
    variables: Mapping[str, object] | None = None


class Cancel(Struct, frozen=True):
    """End the generation `id`; harmless if it is over."""

    id: int


class PrefetchPrompt(Struct, frozen=True):
    """Count a prompt (`PromptCounted`), then prefill it into the KV cache (`PrefixCached`) until another command comes.

    messages: see `Generate`.
    thinking: see `AnswerOptions`.
    id: of the count, which its event names.
    count_only: do not prefill.
    files: texts within the last message to be counted one by one.
    variables: of the chat template.
    """

    messages: Sequence[Mapping[str, str]]
    thinking: Thinking | None = None
    id: int = 0
    count_only: bool = False
    files: Sequence[str] = ()
    variables: Mapping[str, object] | None = None


class Rest(Struct, frozen=True):
    """Do no idle work until the next command: another engine is being measured."""


class TimeSteps(Struct, frozen=True):
    """Time one decode step in `every` by part, from now on; 0: none. Taken during an answer, too."""

    every: int


class LimitKV(Struct, frozen=True):
    """Use at most `total` bytes for the K/V of all sequences, but never less than one of full context needs.

    Another model shares the memory. Taken during an answer, too.
    """

    total: int


class Quit(Struct, frozen=True):
    """Write recent K/V to disk for at most `seconds`, then exit."""

    seconds: float


class Pull(Struct, frozen=True):
    """Fetch a model into the store."""

    name: str


EngineCommand = ModelSpec | Generate | CountTokens | PrefetchPrompt | Cancel | Rest | TimeSteps | LimitKV | Quit | Pull
