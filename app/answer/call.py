"""One parsed request for answers, of any endpoint or line of a batch.

Readers of bodies make it: `openai_form.py` here, `anthropic.py` and `responses.py` of the server, `app.batch.parse`.
`app.server.respond` and `app.batch.run_batch` answer it. A new field needs its use in both, or its refusal in a reader.

Guards: tests/app/server/test_openai.py, test_responses.py and test_anthropic.py.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from headrace.app.answer.options import AnswerOptions
from headrace.models.text.thinking import Thinking
from headrace.models.text.tools.use import ToolUse

Messages = Sequence[Mapping[str, object]]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text}`; calls: see `app.answer.messages`."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of OpenAI's `reasoning_effort`."""
# Levels of models are low, medium and high. Other efforts stand for the nearest one; "max" is Anthropic's.
_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}


class Call(Struct, frozen=True):
    """A request for answers: to a conversation, or to texts that are continued as they are.

    model: name that it asks for; None: any.
    messages: the conversation.
    prompts: texts to continue, in place of `messages`.
    suffix: text after the gap that they leave.
    options: those that it states.
    count: answers to each prompt.
    stream: events while the answers are generated.
    include_usage: a last chunk of a stream has the usage.
    logprobs: best tokens reported with each token; None: off.
    effort: a client's hint about thinking, of `EFFORTS` or "max", which models without thinking ignore.
    budget: a further hint: thinking on or off, or tokens at most.
    continue_text: beginning of the answer.
    tools: that the model may call.
    explain: report the prompt as the model gets it, and why its prefix was cached or not.
    steps: a stream has the figures of its steps.
    echo: fields of the request that its response repeats.
    custom: names of tools that take one text.
    namespaces: namespace and name of tools, by the names that the model sees.
    """

    model: str | None = None
    messages: Messages = ()
    prompts: Sequence[str] = ()
    suffix: str | None = None
    options: AnswerOptions = field(default_factory=AnswerOptions)
    count: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    effort: str | None = None
    budget: bool | int | None = None
    continue_text: str = ""
    tools: ToolUse | None = None
    explain: bool = False
    steps: bool = False
    echo: Mapping[str, object] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """Number of answers."""
        return self.count * max(1, len(self.prompts))

    def thinking(self, default: Thinking | None, *, thinks: bool, has_levels: bool) -> Thinking | None:
        """Return the option that a client's hints mean for a model.

        default: for a request without options or hints of thinking.
        thinks, has_levels: see `ChatPrompt`.
        """
        chosen = self.options.thinking
        if chosen is not None or self.prompts:
            return chosen
        if self.effort == "none":
            return False
        if self.effort is not None and has_levels:
            return _LEVELS.get(self.effort, self.effort)
        if self.budget is not None and (thinks or self.budget is False):
            return self.budget
        if self.effort is not None and thinks:
            return True
        return default
