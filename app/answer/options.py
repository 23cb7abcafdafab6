"""Answer options: one table of names, value types, flags, defaults and help texts.

Every door derives from it: the command line, the settings and presets, a batch line's keys, the Python API and the
chat's parameters. An option has the same name everywhere; its flag has dashes in place of underscores.
CONTRIBUTING.md ("Answer option") lists what a new field needs besides; `tests/app/answer/test_options.py` checks it.
"""

import json
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.models.text.structured.grammar_source import GrammarSource, schema_text
from headrace.models.text.thinking import LEVELS, Thinking
from headrace.runtime.config.value_types import (
    JSONObject,
    JSONSchema,
    OneOf,
    Text,
    TextFile,
    Texts,
    TokenLimit,
    ValueType,
    annotations_of,
    read_value,
)
from headrace.runtime.errors import UsageError
from headrace.runtime.sampling.params import MIN_TEMPERATURE, RANGES, SamplingParams, of_checked

SPECULATE = ("auto", "ngram", "mtp", "off")
"""Choices of draft tokens, where no draft model is named."""
DEFAULT_MAX_TOKENS = 2048
"""Longest answer outside the chat."""
GRAMMARS = ("schema", "regex", "grammar")
"""Options that constrain an answer; at most one is set."""
_SAMPLING = frozenset(SamplingParams.__struct_fields__)
# Options that a model's generation_config.json may recommend.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ThinkingValue(Struct, frozen=True):
    """On, off, a level, or a budget in tokens. `on` and `off` are read as true and false."""

    def read(self, value: object) -> Thinking:
        if isinstance(value, bool):
            return value
        if isinstance(value, str):
            if value in LEVELS:
                return value
            if value in ("on", "off"):
                return value == "on"
            # Nine digits are more than any context; `int` of a text of thousands would take long.
            is_budget = value.isascii() and value.isdigit() and len(value) < 10
            value = int(value) if is_budget else 0
        if isinstance(value, Integral):
            tokens = int(value)
            if tokens > 0:
                return tokens
        raise ValueError(str(self))

    def __str__(self) -> str:
        return f"on, off, {', '.join(LEVELS)} or a number of tokens"


class AnswerOption(Struct, frozen=True):
    """A row of the table.

    kind: the type of its values, which reads and checks them.
    help: a noun phrase.
    short: a short flag.
    default: for the command line's help.
    example: for the settings file; None keeps the option out of it.
    """

    kind: ValueType[object]
    help: str
    short: str = ""
    default: str = ""
    example: float | str | bool | None = None


class AnswerOptions(Struct, frozen=True):
    """Options of an answer. None: not set. `read` checks values; the constructor takes checked ones."""

    temperature: Annotated[
        float | None,
        AnswerOption(
            RANGES["temperature"],
            "Sampling temperature; 0 is greedy",
            short="-t",
            default="the model's, else 0",
            example=0.7,
        ),
    ] = None
    top_k: Annotated[
        int | None, AnswerOption(RANGES["top_k"], "Number of most likely tokens kept; 0 is off", example=40)
    ] = None
    top_p: Annotated[
        float | None, AnswerOption(RANGES["top_p"], "Probability mass of the tokens kept; 1 is off", example=0.95)
    ] = None
    min_p: Annotated[
        float | None,
        AnswerOption(RANGES["min_p"], "Least probability kept, relative to the best token's", example=0.05),
    ] = None
    repetition_penalty: Annotated[
        float | None, AnswerOption(RANGES["repetition_penalty"], "Penalty on tokens seen before; 1 is off", example=1.1)
    ] = None
    presence_penalty: Annotated[
        float | None,
        AnswerOption(RANGES["presence_penalty"], "Amount subtracted once from tokens generated before", example=0.0),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        AnswerOption(RANGES["frequency_penalty"], "Amount subtracted per occurrence of a token", example=0.0),
    ] = None
    logit_bias: Annotated[
        Mapping[int, float] | None, AnswerOption(RANGES["logit_bias"], "Amount added to one token's logit")
    ] = None
    seed: Annotated[
        int | None, AnswerOption(RANGES["seed"], "Random seed; same seed, same machine, same answer", example=1)
    ] = None
    max_tokens: Annotated[
        int | None,
        AnswerOption(
            TokenLimit(), "Longest answer in tokens; -1: any", short="-n", default=str(DEFAULT_MAX_TOKENS), example=2048
        ),
    ] = None
    stop: Annotated[tuple[str, ...] | None, AnswerOption(Texts(), "Text that ends the answer")] = None
    speculate: Annotated[
        str | None, AnswerOption(OneOf(SPECULATE), "Source of draft tokens; same answer", default="auto", example="off")
    ] = None
    thinking: Annotated[
        bool | int | str | None,
        AnswerOption(
            ThinkingValue(),
            "Thinking: on, off, a level, or a budget in tokens, where the model allows it",
            example=False,
        ),
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, object] | None,
        AnswerOption(JSONObject(), "Variables of the model's chat template, such as preserve_thinking"),
    ] = None
    schema: Annotated[
        Mapping[str, object] | bool | None,
        AnswerOption(JSONSchema(), "JSON schema that the answer fits, or `object` for any JSON object"),
    ] = None
    regex: Annotated[str | None, AnswerOption(Text(), "Regular expression that the whole answer matches")] = None
    grammar: Annotated[str | None, AnswerOption(TextFile(), "Lark grammar that the answer follows")] = None

    @classmethod
    def read(
        cls,
        values: Mapping[str, object],
        *,
        aliases: Mapping[str, str] | None = None,
        shown_as: Callable[[str], str] = str,
    ) -> "AnswerOptions":
        """Return options from values by name; None is not set. Nothing checks them again later.

        aliases: further names of options; of two names of the longest answer the smaller value counts.
        shown_as: returns a name's form in errors, such as a flag.
        Raises UsageError for an unknown name, for a value out of range, and for two grammars.
        """
        aliases = aliases or {}
        given: dict[str, Any] = {}
        for key, value in values.items():
            name = aliases.get(key, key)
            if name not in OPTIONS:
                raise UsageError(f"unknown option {key!r}; known options: {', '.join(OPTIONS)}")
            if value is None:
                continue
            read = read_value(OPTIONS[name].kind, shown_as(key), value)
            if name in given and name == "max_tokens":
                read = min(read, given[name])
            elif name in given and read != given[name]:
                raise UsageError(f"{shown_as(key)} and {shown_as(name)} mean the same: give one of them")
            given[name] = read
        grammars = [name for name in GRAMMARS if name in given]
        if len(grammars) > 1:
            raise UsageError(f"{' and '.join(grammars)} exclude each other", "give one of them")
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}

    def stored(self) -> dict[str, Any]:
        """Return the options that are set, as a session stores them: JSON values, without a logit bias.

        `app.chat.answer_setup.stored_options` reads them again. A schema and template variables are stored as texts.
        """
        given = {name: value for name, value in self.given().items() if name != "logit_bias"}
        if self.schema is not None:
            given["schema"] = json.dumps(self.schema, ensure_ascii=False)
        if self.chat_template_kwargs is not None:
            given["chat_template_kwargs"] = json.dumps(self.chat_template_kwargs, ensure_ascii=False)
        if self.stop is not None:
            given["stop"] = list(self.stop)
        return given

    def over(self, base: "AnswerOptions") -> "AnswerOptions":
        """Return these options, and those of `base` where they are not set."""
        # A schema here replaces a regular expression there: two grammars exclude each other.
        none = dict.fromkeys(GRAMMARS) if self.constrained else {}
        return replace(base, **(none | self.given()))

    @property
    def constrained(self) -> bool:
        """True with a schema, a regular expression or a grammar."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    def grammar_source(self) -> GrammarSource | None:
        """Return the grammar of the answer; None if it is free. Raises UsageError for a schema that is not allowed."""
        if self.schema is not None:
            return GrammarSource("schema", schema_text(self.schema))
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.grammar is not None:
            return GrammarSource("grammar", self.grammar)
        return None

    def resolved(self, recommended: "AnswerOptions") -> "AnswerOptions":
        """Return these options over those that the model recommends, over greedy decoding.

        A recommended repetition penalty applies to sampled answers only.
        """
        base = recommended.over(_GREEDY)
        temperature = self.over(base).temperature or 0.0
        if temperature < MIN_TEMPERATURE:  # greedy decoding takes the model's most likely tokens
            base = replace(base, repetition_penalty=None)
        return self.over(base)

    def sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters, greedy decoding where nothing is set."""
        return of_checked({name: value for name, value in self.given().items() if name in _SAMPLING})

    @classmethod
    def of_sampling(cls, params: SamplingParams) -> "AnswerOptions":
        """Return sampling parameters as options, all of them set but a missing seed."""
        return cls(**{name: getattr(params, name) for name in _SAMPLING})


OPTIONS: Mapping[str, AnswerOption] = annotations_of(AnswerOptions)
"""The table, by name."""
DEFAULTS = AnswerOptions(max_tokens=DEFAULT_MAX_TOKENS)
"""Options outside the chat, where nothing else is set."""
_GREEDY = AnswerOptions(temperature=0.0)
SamplingSource = Literal["options", "session", "settings", "model", "default"]
"""Origin of an answer's temperature; `default` is greedy decoding."""


def recommended_options(recommended: Mapping[str, object]) -> AnswerOptions:
    """Return the options that a model recommends, in the form of a generation_config.json.

    `do_sample` alone is temperature 1; `do_sample: false` is greedy decoding.
    """
    if recommended.get("do_sample") is False:
        return _GREEDY
    numbers: dict[str, object] = {
        name: int(value) if name == "top_k" else float(value)
        for name, value in recommended.items()
        if name in _RECOMMENDED and isinstance(value, int | float) and not isinstance(value, bool)
    }
    usual = AnswerOptions(temperature=1.0) if recommended.get("do_sample") is True else AnswerOptions()
    return AnswerOptions.read(numbers).over(usual)


def sampling_source(layers: Mapping[SamplingSource, AnswerOptions], recommended: AnswerOptions) -> SamplingSource:
    """Return the first of `layers` that sets the temperature, else the model if it recommends one."""
    layers = {**layers, "model": recommended}
    return next((source for source, options in layers.items() if options.temperature is not None), "default")
