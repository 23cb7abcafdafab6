"""One parsed request of any endpoint, and the commands that it becomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.commands import Generate
from headrace.app.engine.model_card import ModelCard
from headrace.models.text.thinking import Thinking
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.sampling.params import SEEDS

Messages = Sequence[Mapping[str, object]]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request for answers: to a conversation, or to texts that are continued as they are.

    model: the name that it asks for; None: any. count: answers to each prompt. effort, budget: hints of a client about
    thinking, which models without thinking ignore. include_usage: a last chunk of a stream has the usage. logprobs:
    best tokens reported with each token; None: off. continue_text: beginning of the answer. explain: report the prompt
    as the model gets it, and why its prefix was cached or not. steps: a stream has the figures of its steps. echo:
    fields of the request that its response repeats. custom: names of tools that take one text. namespaces: namespace
    and name of tools, by the names that the model sees.
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

    def commands(self, ids: Sequence[int], card: ModelCard, defaults: AnswerOptions) -> list[Generate]:
        """Return one command per choice. defaults: options that the request does not set."""
        options = self.options.over(defaults)
        thinking = self.thinking(card, defaults)
        prompts: Sequence[str | None] = self.prompts or (None,)
        commands = []
        for number, generation in enumerate(ids):
            prompt = prompts[number // self.count]
            repeat = number % self.count
            seed = options.seed if options.seed is None else (options.seed + repeat) % SEEDS
            commands.append(
                Generate(
                    generation,
                    self.messages if prompt is None else (),
                    replace(options, thinking=thinking, seed=seed),
                    prompt=prompt,
                    suffix=self.suffix,
                    logprobs=self.logprobs,
                    continue_text=self.continue_text,
                    tools=self.tools,
                    explain=self.explain,
                )
            )
        return commands

    def thinking(self, card: ModelCard, defaults: AnswerOptions) -> Thinking | None:
        """Return the option that a client's hints mean for a model."""
        if self.prompts:
            return self.options.thinking
        if self.options.thinking is None and self.effort == "none":
            return False
        if self.options.thinking is None and self.effort is not None and card.thinking_levels:
            return _LEVELS.get(self.effort, self.effort)
        if self.options.thinking is None and self.budget is not None and (card.thinks or self.budget is False):
            return self.budget
        hinted = self.options.thinking is None and self.effort is not None and card.thinks
        if hinted:
            return True
        return defaults.thinking if self.options.thinking is None else self.options.thinking
