"""Encoding of conversations, including the beginning of an answer, and of texts to continue.

Reasoning models wrap their thinking in `<think>` tags. If the template writes the opening tag at the end of the prompt,
`opening` returns it, so that a stored answer contains the whole section.

Guards: tests/models/text/test_chat_prompt.py and test_fill_in_middle.py.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.models.text.adapt_messages import adapt_messages, with_argument_objects, with_calls
from headrace.models.text.chat_template import Message
from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.template_text import TemplateText, concatenate
from headrace.models.text.thinking import CLOSE, LEVELS, NO_TEXT, OPEN, OPENING, TextByKind, Thinking, read_tags
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError
from headrace.runtime.sampling.section_limit import SectionLimit

_TAGS = re.compile(f"({OPEN}|{CLOSE})")
_EFFORTS = ("reasoning_effort", "thinking_effort")  # take a level: GPT-OSS, Mistral Small 4; Kimi K3
_BUDGET = "thinking_budget"
# Variables that turn thinking on or off in one family's template or another, and both values.
_SWITCHES: dict[str, tuple[object, object]] = {
    "enable_thinking": (True, False),  # Qwen, GLM, SmolLM3, Gemma 4, Nemotron
    "thinking": (True, False),  # DeepSeek, Granite, Kimi
    "reasoning": (True, False),  # Command A
    "thinking_mode": ("enabled", "disabled"),  # MiniMax
    "thinking_option": ("on", "off"),  # Ling
    "thinking_budget": (-1, 0),  # Seed-OSS
}
# Hints that clients send to any model; a template without them has nothing to change.
_HINTS = frozenset([*_SWITCHES, *_EFFORTS, "preserve_thinking", "clear_thinking"])
_TAIL = 8  # tokens at the end of a prompt that can contain an opening tag
# Offer of tools for templates that write none, around a call in the model's form and the definitions.
_OFFER_BEGIN = TemplateText("You can call functions. To call one, answer with the call alone, in exactly this form:\n")
_OFFER_END = TemplateText(
    "\nfunction_name is the name of a function, and the arguments are those of its parameters. The functions are:\n"
)
_EXAMPLE = {"name": "function_name", "arguments": {"parameter_name": "value"}}


class ChatPrompt:
    """Encoder of conversations for one model.

    thinks: the model's answers may have a thinking section.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        # By tags that the template writes, or control tokens.
        self.thinks = template is not None and any(CLOSE in source for source in template.sources.values())
        self.thinks = self.thinks or tokenizer.thinking_form is not None
        sources = ""
        self._rules: dict[bool, TemplateRules] = {}
        if template is not None:
            sources = " ".join(template.sources.values())
            self._rules = {offers: TemplateRules(template, offers_tools=offers) for offers in (False, True)}
        # The template's variables for thinking: on and off, a level, and whether a level turns it off.
        self._switches = [name for name in _SWITCHES if re.search(rf"\b{name}\b", sources)]
        self._effort = next((name for name in _EFFORTS if re.search(rf"\b{name}\b", sources)), "")
        self._off_level = self.has_levels and re.search(r"""["']none["']""", sources) is not None

    def encode(
        self,
        messages: Sequence[Message],
        begun: TextByKind = NO_TEXT,
        *,
        thinking: Thinking | None = None,
        tools: ToolUse | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the prompt for the next answer, or for the continuation of the one that has begun.

        messages: the conversation.
        begun: the answer that has begun; empty for a next one.
        thinking: on or off, where the template has a switch, a level, or a budget, which `section_limit` enforces; None
            leaves it undefined.
        tools: those the model may call.
        variables: of the template; they take precedence.

        Raises UsageError for a level, a budget or a variable that the model does not know, and the errors of
        `Tokenizer.encode_chat`.
        """
        # Variables of the template.
        given = {} if thinking is None else self._variables(thinking)
        given |= self._checked_variables(variables or {})

        # Messages and tools as the template takes them.
        if self.thinks:
            messages = _with_thinking_fields(messages)
        messages = [self._shielded(message) for message in with_argument_objects(messages)]
        if self._rules:
            rules = self._rules[False]
            definitions: Sequence[Mapping[str, object]] = ()
            if tools is not None and tools.callable and self._rules[True].takes_tools:
                rules = self._rules[True]
                definitions = tools.definitions
            elif tools is not None and tools.callable:  # offered in a text to a template that writes none
                messages = _with_offer(messages, tools, self._write_calls([_EXAMPLE]))
            messages = adapt_messages(messages, rules, self._write_calls)
            given |= rules.tool_variables(definitions)

        prompt = self._tokenizer.encode_chat(messages, **given)
        if not begun.text:
            return prompt
        return prompt + self._begun_ids(begun, is_open=bool(self.opening(prompt)))

    def _begun_ids(self, begun: TextByKind, *, is_open: bool) -> list[int]:
        """Return the ids of an answer's beginning. is_open: the prompt has its opening tag."""
        form = self._tokenizer.thinking_form
        if form is not None:
            pieces = form.native(begun, is_open=is_open)
        else:
            answer = begun.text
            if is_open:
                answer = begun.text.removeprefix(OPEN).removeprefix("\n")
            # The tags are control tokens for some models and text for others.
            if self.thinks:
                parts = [part for part in _TAGS.split(answer) if part]
            else:
                parts = [answer]
            pieces = [(part, self.thinks and part in (OPEN, CLOSE)) for part in parts]
        return [token for part, special in pieces for token in self._tokenizer.encode(part, special=special)]

    def continued(self, text: str, suffix: str | None = None) -> list[int]:
        """Return the prompt of a text to continue as it is, or to continue up to `suffix`.

        Raises UsageError if the model has no tokens for a gap, and the errors of `Tokenizer.encode_prompt`.
        """
        if suffix is None:
            return continued_text(self._tokenizer, text)
        return fill_in_middle(self._tokenizer, text, suffix)

    @property
    def has_levels(self) -> bool:
        """True if the template knows levels of thinking."""
        return self._effort != ""

    def may_think(self, thinking: Thinking | None) -> bool:
        """Return whether an answer may begin with thinking. Harmony's answers always have channels."""
        form = self._tokenizer.thinking_form
        return self.thinks and (thinking is not False or (form is not None and form.has_channels))

    def _shielded(self, message: Message) -> Message:
        """Return an answer in which the control tokens that its texts spell are no marks to the template."""
        if message.get("role") != "assistant":
            return message
        shield = self._tokenizer.shield
        texts = ("content", "reasoning_content", "thinking")
        changed = {key: _with_texts(message[key], shield) for key in texts if key in message}
        all_marks = partial(shield, markup=True)
        return with_calls(
            {**message, **changed}, lambda call: {**call, "function": _with_texts(call["function"], all_marks)}
        )

    def _write_calls(self, calls: Sequence[Mapping[str, object]]) -> str:
        """Return calls of earlier answers in the model's form, for a template that shows none."""
        from headrace.models.text.tools.table import write_calls  # late: most conversations have no tools

        return write_calls(self._tokenizer, calls)

    def section_limit(self, thinking: Thinking | None, *, is_open: bool) -> SectionLimit | None:
        """Return the limit on the thinking section; None if `thinking` is no budget. is_open: the prompt begins it."""
        if thinking is None or isinstance(thinking, bool | str):
            return None
        form = self._tokenizer.thinking_form
        opening = OPEN
        closing = CLOSE
        if form is not None:
            opening = form.opening
            closing = form.closing
        opening_ids: tuple[int, ...] = ()  # the section has begun
        if not is_open:
            opening_ids = tuple(self._tokenizer.encode(opening, special=True))
        return SectionLimit(thinking, opening_ids, tuple(self._tokenizer.encode(closing, special=True)))

    def _variables(self, thinking: Thinking) -> dict[str, Any]:
        """Return the template's variables for a kind of thinking. Raises UsageError for one that it does not know."""
        variables: dict[str, Any] = {}
        for name in self._switches:
            on, off = _SWITCHES[name]
            variables[name] = on if thinking else off
        if isinstance(thinking, bool):
            if not variables and not thinking and self._off_level:
                variables[self._effort] = "none"
            return variables
        if isinstance(thinking, str):
            if self.has_levels:
                return variables | {self._effort: self._nearest_level(thinking)}
            if self.thinks:
                return variables
            raise UsageError(f"thinking {thinking}: the model does not think", "leave it out, or say off")
        if not self.thinks:
            raise UsageError(f"thinking {shown(thinking)}: the model has no thinking section that could be ended")
        if _BUDGET in variables:
            variables[_BUDGET] = thinking
        return variables

    def _nearest_level(self, level: str) -> str:
        """Return the level that the template takes, the nearest one to `level`."""
        distance = {each: abs(LEVELS.index(each) - LEVELS.index(level)) for each in LEVELS}
        ordered = sorted(LEVELS, key=distance.__getitem__)
        return next((each for each in ordered if self._rules[False].accepts({self._effort: each})), level)

    def _checked_variables(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return variables of the template. Raises UsageError for one that neither it nor another model's reads."""
        if not variables:
            return variables  # most prompts have none, and those that a template reads take 12 ms to find
        template = self._tokenizer.chat_template
        read = frozenset[str]()
        if template is not None:
            read = template.variables
        unknown = next((name for name in variables if name not in read and name not in _HINTS), None)
        if unknown is not None:
            names = ", ".join(sorted(read)) or "none"
            raise UsageError(
                f"chat_template_kwargs.{unknown}: the model's chat template reads no such variable",
                f"it reads: {names}",
            )
        known = {name: value for name, value in variables.items() if name in read}
        if known.get(self._effort) in LEVELS:
            known[self._effort] = self._nearest_level(known[self._effort])
        return known

    def opening(self, prompt: Sequence[int]) -> str:
        """Return the part of the answer that the template has written: an opening tag, or nothing."""
        if not self.thinks:
            return ""
        form = self._tokenizer.thinking_form
        if form is not None and form.has_tags:
            tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False)
            return OPENING if tail.endswith(form.opening) else ""
        if form is not None and not form.has_channels:
            # The last mark of the tail decides: a template that turns thinking off opens and closes an empty section.
            marks = [form.ids[index] for index in prompt[-_TAIL:] if index in form.ids]  # "open" or "close"
            return OPENING if marks[-1:] == ["open"] else ""
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False)
        return OPENING if tail.rstrip().endswith(OPEN) else ""


def _with_texts(value: object, change: Callable[[str], str]) -> object:
    """Return JSON data with all texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, change) for item in value]
    return value


def _with_thinking_fields(messages: Sequence[Message]) -> list[Message]:
    """Move thinking from `reasoning_content`, or from tags that a client sends, to the fields that templates read."""
    converted: list[Message] = []
    for message in messages:
        content = message.get("content")
        if (reasoning := message.get("reasoning_content")) is not None:
            converted.append({**message, "thinking": reasoning})
            continue
        answer = None
        if message.get("role") == "assistant" and isinstance(content, str):
            answer = read_tags(content)
        if answer is None or answer.thinking is None:
            converted.append(dict(message))
            continue
        thinking = {"thinking": answer.thinking, "reasoning_content": answer.thinking}
        converted.append({**message, "content": answer.content, **thinking})
    return converted


def _with_offer(messages: Sequence[Mapping[str, object]], tools: ToolUse, example: str) -> list[Mapping[str, object]]:
    """Return messages whose system message offers the tools. example: a call as the model writes it."""
    functions = "\n".join(json.dumps(definition["function"], ensure_ascii=False) for definition in tools.definitions)
    offer = concatenate([_OFFER_BEGIN, example, _OFFER_END, functions])
    begin = 0
    while begin < len(messages) and messages[begin].get("role") in ("system", "developer"):
        begin += 1
    return [*messages[:begin], {"role": "system", "content": offer}, *messages[begin:]]


# --- gaps in a text, for code models -------------------------------------------------------------------------

# Tokens before the prefix, before the suffix, and after it. Sources of the orders: the model cards of StarCoder,
# Qwen2.5-Coder, CodeGemma and DeepSeek-Coder (prefix, suffix, middle), and of Codestral (suffix, prefix).
_GAP_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# Tokens before the suffix, and before the prefix after it.
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
_FILE_MARKS = (  # around the files of a repository
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<repo_name>", "<file_sep>", "<reponame>",
    "<filename>", "<|file_separator|>",
)  # fmt: skip


def fill_in_middle(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the prompt whose continuation is the text between both. Raises UsageError for a model without such tokens.

    Raises what `Tokenizer.encode_prompt` raises.
    """
    vocabulary = {text: token for token, text in tokenizer.vocabulary().items()}
    start = tokenizer.encode_prompt("")
    before = tokenizer.encode(prefix)
    after = tokenizer.encode(suffix)
    for form in _GAP_FORMS:
        if all(text in vocabulary for text in form):
            opening, gap, end = (vocabulary[text] for text in form)
            return [*start, opening, *before, gap, *after, end]
    if all(text in vocabulary for text in _SUFFIX_FIRST):
        first, second = (vocabulary[text] for text in _SUFFIX_FIRST)
        return [*start, first, *after, second, *before]
    raise UsageError("suffix: the model has no fill-in-the-middle tokens", "leave it out, or use a code model")


def continued_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the prompt of a text to continue as it is.

    Editors write the tokens of a gap into it. Where all of one family are there, and the model has them, they are
    tokens; all other control tokens are text. Raises what `Tokenizer.encode_prompt` raises.
    """
    forms = (form for form in (*_GAP_FORMS, _SUFFIX_FIRST) if all(mark in text for mark in form))
    form = next((form for form in forms if all(tokenizer.token_id(mark) is not None for mark in form)), None)
    if form is None:
        return tokenizer.encode_prompt(text)
    marks = "|".join(re.escape(mark) for mark in (*form, *_FILE_MARKS) if tokenizer.token_id(mark) is not None)
    ids = tokenizer.encode_prompt("")
    for part in re.split(f"({marks})", text):
        index = None
        if re.fullmatch(marks, part):
            index = tokenizer.token_id(part)
        if index is None:
            ids += tokenizer.encode(part)
        else:
            ids.append(index)
    return ids
