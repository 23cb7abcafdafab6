"""The base of the forms of tool calls: the markup of a model family, read and written as a grammar.

Control tokens of the markup that a detokenizer drops stand in the text as single characters (`MarkupTokens`), which no
text of a model contains. So text that only spells such a token is not taken for it.

`call_rules` makes the grammar of a request's calls: forced ones, and optional ones from the moment that their markup
begins. The rules of one family are in its form.

Guards: tests/models/text/tools/test_forms.py and test_round_trip.py.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence

from msgspec import Struct

from headrace.models.text.tools.call import Reading, Tool, ToolCall, write_json_calls
from headrace.models.text.tools.cut import cut_json_calls
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.use import ToolUse

_FIRST = 0xD800  # the first of the lone surrogates, which a detokenizer never returns; `_MARK` has all
_MARK = re.compile("[\ud800-\udfff]")
_SPACED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}  # as templates write JSON


class MarkupTokens:
    """Control tokens of markup: their ids and the characters that stand for them."""

    def __init__(self, texts: Sequence[str], id_of: Callable[[str], int | None], special: frozenset[int]) -> None:
        """texts: the markup. Texts that are no special tokens of the vocabulary stand for themselves.

        id_of: returns a token's id; None if there is none.
        special: ids of tokens that the detokenizer drops.
        """
        ids = {text: index for text in texts if (index := id_of(text)) is not None and index in special}
        self._characters = {text: chr(_FIRST + number) for number, text in enumerate(ids)}
        self.ids = ids
        self.character_of = {ids[text]: char for text, char in self._characters.items()}

    def __call__(self, text: str) -> str:
        """Return the text with characters in place of control tokens."""
        for token, char in self._characters.items():
            text = text.replace(token, char)
        return text

    def visible(self, text: str) -> str:
        """Return the text without these characters: what the detokenizer would have returned."""
        return _MARK.sub("", text)


class ToolForm(ABC):
    """A family's tool calls.

    To read and write calls:

    begins: texts that begin calls, anywhere in an answer.
    bare: an answer that begins with JSON may be a call without markup.
    head: text before a call's arguments, as a grammar writes it, with the tool's name as its group; None if they are
        not JSON. In Hermes' form: `{"name": "get_weather", "arguments": `.
    names: the tools that a cut call may name; None: any.
    markup: the texts around the parts of calls; None if they are JSON objects alone.

    For the grammar of answers (`call_rules`). Its calls are `rule_begin` and the rule `rest`, see `rules`.

    rule_begin: the markup, as the model writes it, from which a call is constrained; "" for none. In Hermes' form:
        `<tool_call>`.
    parallel: an answer may have several calls.
    separator: the text between `rest` and the next `rule_begin`; None if an answer has one `rest`.
    end_of_text: the beginning of `rule_begin`, where an answer's text has it after it without calls, too; "" elsewhere.
        In Kimi K3's form: `<|close|>response<|sep|>`. From `ThinkingForm`, as is `end_of_answer`.
    end_of_answer: the text after `end_of_text` in an answer without calls: `<|close|>message<|sep|>`.
    text_head: the text between `rule_begin` and a text without calls, where that has the same beginning; "" elsewhere.
        In Harmony: `final<|message|>`.
    other_calls: rule of calls that do not begin with `rule_begin`; "" for none.
    """

    begins: Sequence[str] = ()
    bare: bool = False
    head: re.Pattern[str] | None = None
    names: Container[str] | None = None
    markup: Markup | None = None
    rule_begin: str = ""
    parallel: bool = True
    separator: str | None = None
    end_of_text: str = ""
    end_of_answer: str = ""
    text_head: str = ""
    other_calls: str = ""

    @abstractmethod
    def read(self, text: str, *, final: bool) -> Reading | None:
        """Read the calls that the text begins with, after one of `begins` or as JSON; None if it needs more text.

        final: the answer has ended.
        """

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        """Return the calls in a text that a limit cut, the last one with a part of its arguments' JSON text.

        Empty if no call has its name yet.
        """
        if self.head is None:
            return ()
        calls = cut_json_calls(text, self.head)
        return tuple(call for call in calls if self.names is None or call.name in self.names)

    def write(self, calls: Sequence[Mapping[str, object]]) -> str:
        """Return calls {"name": ..., "arguments": {...}} as the model writes them, for templates that show none."""
        if self.markup is None:
            return write_json_calls(calls)
        return self.markup.write(calls)

    @abstractmethod
    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        """Return Lark rules, first `rest`: the text after `rule_begin` up to the end of a call, or of all.

        literal: returns a text with control tokens as Lark.
        """


def json_head(key: str = "arguments") -> re.Pattern[str]:
    """Return the `head` of calls that are JSON objects."""
    return re.compile(f'\\{{"name": "([^"]+)", "{key}": ')


def arguments_rule(number: int, tool: Tool, *, any_space: bool = False) -> str:
    """Return the rule `arguments{number}`: the tool's arguments as a JSON object. any_space: it may have lines."""
    return f"arguments{number}: %json {schema_json(tool.schema, any_space=any_space)}"


def arguments_rules(tools: Sequence[Tool], *, any_space: bool = False) -> list[str]:
    """Return the rules `arguments0` and so on of all tools, see `arguments_rule`."""
    return [arguments_rule(number, tool, any_space=any_space) for number, tool in enumerate(tools)]


def one_call(tools: Sequence[Tool]) -> str:
    """Return Lark of a call of any tool: a choice of the rules `call0`, `call1` and so on."""
    return " | ".join(f"call{number}" for number in range(len(tools)))


def ordered_rules(name: str, written: Mapping[str, str], required: Container[str], separator: str) -> list[str]:
    """Return rules of parameters in an order, from `first{name}x0` on: those that are not required may be left out.

    Each rule names those of the next parameter; the rules after the last are empty. So their number grows with the
    parameters, not with the sets of them that may be left out.

    name: part of the names of these rules.
    written: Lark of each parameter, by its name in this order.
    required: names of the parameters that may not be left out.
    separator: Lark between two.
    """
    rules: list[str] = []
    for index, (parameter, lark) in enumerate(written.items()):
        following = f"{name}x{index + 1}"
        choice_first = f" | first{following}"
        choice_later = f" | later{following}"
        if parameter in required:
            choice_first = ""
            choice_later = ""
        # `first`: no parameter has been written yet; `later`: one has, so the separator comes before the next.
        rules.append(f"first{name}x{index}: {lark} later{following}{choice_first}")
        rules.append(f"later{name}x{index}: {quoted(separator)} {lark} later{following}{choice_later}")
    last = f"{name}x{len(written)}"
    return [*rules, f"first{last}:", f"later{last}:"]


def schema_json(schema: Mapping[str, object], *, any_space: bool = False) -> str:
    """Return a schema for `%json`. any_space: white space of any length may stand between its parts."""
    form: Mapping[str, object] = _SPACED
    if any_space:
        form = {"whitespace_flexible": True}
    return json.dumps({**schema, "x-guidance": form}, ensure_ascii=False)


def literal_pattern(text: str) -> str:
    """Return the regular expression of one text for Lark's `/.../`: without the slashes around it, in one line."""
    # `re.escape` leaves a slash as it is, and a line break after a backslash.
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def quoted(text: str) -> str:
    """Return a text as a Lark literal."""
    if not text:
        return ""
    return json.dumps(text, ensure_ascii=False)


class CallRules(Struct, frozen=True):
    """Lark rules: `calls`, one or more of them, and `answer`, a text with or without calls.

    forced: the answer is `calls`. `TEXT` is any text, and is defined elsewhere.
    """

    text: str
    forced: bool


def call_rules(form: ToolForm, use: ToolUse, literal: Callable[[str], str]) -> CallRules | None:
    """Return the rules of a request's calls; None if no tool may be called.

    literal: returns a text with control tokens as Lark.
    """
    tools = use.callable
    if not tools:
        return None
    begin = literal(form.rule_begin)
    more = ""
    if use.parallel and form.separator is not None:
        more = f"({literal(form.separator)} {begin} rest)*"
    calls = f"calls: {begin} rest {more}"
    if form.other_calls:
        calls += f" | {form.other_calls}"
    return CallRules("\n".join([calls, *_answer(form, begin, literal, use), form.rules(tools, literal)]), use.is_forced)


def _answer(form: ToolForm, begin: str, literal: Callable[[str], str], use: ToolUse) -> list[str]:
    """Return the rules of `answer`."""
    if form.text_head:
        return [f"answer: calls | {begin} {literal(form.text_head)} TEXT"]
    if not form.rule_begin:
        return ["answer: calls"]
    if form.end_of_text:
        call = f"{literal(form.rule_begin.removeprefix(form.end_of_text))} rest"
        return [f"answer: TEXT ({literal(form.end_of_text)} ({call} | {literal(form.end_of_answer)})?)?"]
    times = "*" if use.parallel else "?"
    # `begin` as Lark: `<[7]>` for a control token, or literals before one. Text before the first control token belongs
    # to TEXT, where a lone `<` is nothing special.
    if "<[" in begin:
        from_token = begin[begin.index("<[") :]
        return [f"answer: (TEXT {from_token} rest){times} TEXT"]
    return [f"answer: (before rest){times} TEXT", f"before[lazy]: /(.|\\n)*{literal_pattern(form.rule_begin)}/"]
