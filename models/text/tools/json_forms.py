"""Forms of calls whose arguments are JSON: in tags, as a list, as the whole answer, after a name or a recipient.

Rows of `table.FORMS` make them. `tests/models/text/tools/test_forms.py` reads each form in pieces of any size.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from headrace.models.text.answer_streams import MARK
from headrace.models.text.thinking_forms import CALL_BEGIN, CALL_MESSAGE
from headrace.models.text.tools.call import Reading, Tool, ToolCall, calls_of, no_call
from headrace.models.text.tools.cut import cut_json_calls
from headrace.models.text.tools.form import (
    MarkupTokens,
    ToolForm,
    arguments_rule,
    arguments_rules,
    json_head,
    one_call,
    quoted,
)
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

_FENCE = "```"
HERMES_MARKUP = ("<tool_call>", "</tool_call>")


class Hermes(ToolForm):
    """Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3: objects in tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
    """

    head = json_head()
    separator = "\n"
    markup = Markup(
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator='}\n</tool_call>\n<tool_call>\n{"name": "',
    )

    def __init__(self, marks: MarkupTokens) -> None:
        self.rule_begin, self._rule_end = HERMES_MARKUP
        self._begin, self._end = map(marks, HERMES_MARKUP)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        return read_json(text, len(self._begin), self._end, final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return json_rules(tools, '\n{"name": "%s", "arguments": ', "}\n", literal(self._rule_end))


def read_json(text: str, start: int, end: str, *, final: bool) -> Reading | None:
    """Read a JSON call, or a list of them, after `start` characters of markup; `end` may be missing."""
    try:
        value, position = leading_value(text, start)
    except UnfinishedError:
        return no_call(start, final=final)
    except ValueError:
        return Reading(start)
    calls = calls_of(value)
    if not calls:
        return Reading(start)
    return ended(text, position, end, calls=Reading(position, calls), final=final)


def ended(text: str, position: int, end: str, *, calls: Reading, final: bool) -> Reading | None:
    """Return the calls with their closing markup, after spaces from `position` on; None while it is incomplete."""
    rest = text[position:].lstrip()
    if end and rest.startswith(end):
        return Reading(len(text) - len(rest) + len(end), calls.calls)
    if end and not final and end.startswith(rest):
        return None
    return calls


def json_rules(
    tools: Sequence[Tool], before: str, after: str, end: str, *, rule: str = "rest", opening: str = ""
) -> str:
    """Return the rules of calls as JSON objects.

    before: text up to the arguments, with the tool's name for %s.
    after: text from the arguments to the end of the object.
    end: Lark of the text after it.
    rule: name of the first rule.
    opening: Lark of the text before the object.
    """
    calls = [f"call{n}: {quoted(before % tool.name)} arguments{n} {quoted(after)}" for n, tool in enumerate(tools)]
    return "\n".join([f"{rule}: {opening} ({one_call(tools)}) {end}", *calls, *arguments_rules(tools)])


def json_list_rules(tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the rules of a list of calls as JSON objects. parallel: it may have several."""
    call = json_rules(tools, '{"name": "%s", "arguments": ', "}", "", rule="call")
    more = ""
    if parallel:
        more = '(", " call)*'
    return f'rest: "[" call {more} "]"\n{call}'


GRANITE_MARKUP = ("<|tool_call|>",)


class Granite(ToolForm):
    """Granite 3: a list up to the end of the turn.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    """

    head = json_head()
    markup = Markup(
        begin='<|tool_call|>[{"name": "',
        middle='", "arguments": ',
        end="}]",
        separator='}, {"name": "',
    )

    def __init__(self, marks: MarkupTokens) -> None:
        [self.rule_begin] = GRANITE_MARKUP
        self._begin = marks(self.rule_begin)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        return read_json(text, len(self._begin), "", final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:  # noqa: ARG002 - all of it is text
        return json_list_rules(tools, parallel=self.parallel)


_TOOL_CALLS = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
MISTRAL_MARKUP = (_TOOL_CALLS, _ARGUMENTS, CALL_ID)
_NAME = r"\s*([\w.:/-]+)\s*"  # of a tool, as a regular expression


def _beginning(text: str) -> str:
    """Return a regular expression of a text's beginnings, the whole text included."""
    return f"(?:{'|'.join(re.escape(text[:length]) for length in range(len(text), -1, -1))})"


_MISTRAL_LIST = Markup(
    begin='[TOOL_CALLS][{"name": "',
    middle='", "arguments": ',
    end="}]",
    separator='}, {"name": "',
)
_MISTRAL_MARKED = Markup(begin="[TOOL_CALLS]", middle="[ARGS]", end="", separator="[TOOL_CALLS]")


class Mistral(ToolForm):
    """Mistral from version 3 of its tokenizer on: a list of JSON calls, or from version 11 on a name and arguments.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}

    writes_ids: each call has an identifier.
    """

    def __init__(self, marks: MarkupTokens, *, writes_ids: bool = False) -> None:
        self._writes_ids = writes_ids
        self.rule_begin = _TOOL_CALLS
        self._begin, self._arguments, self._id = map(marks, MISTRAL_MARKUP)
        self.begins = (self._begin,)
        # Three patterns of the text before a call's arguments. A change of one is a change of all.
        # `_head`, from the name to `{`: `get_weather[CALL_ID]a1b2c3d4e[ARGS]`. Both may be missing after the name.
        # `head`, that of `ToolForm`, from the mark on: `[TOOL_CALLS]get_weather[ARGS]`.
        # `_begun`, any beginning of `_head`: `get_weather[CALL_ID]a1b2c3d4e[AR`.
        stops = f"[^{re.escape(self._arguments[0])}{{]*"
        id = f"{re.escape(self._id)}{stops}"
        self._head = re.compile(f"{_NAME}(?:{id})?(?:{re.escape(self._arguments)})?(?={{)")
        self._lists = _ARGUMENTS not in marks.ids  # versions before 11
        if self._lists:
            self.markup = _MISTRAL_LIST
            self.head = json_head()
        else:
            self.separator = ""
            self.markup = _MISTRAL_MARKED
            self.head = re.compile(f"{re.escape(self._begin)}{_NAME}(?:{id})?{re.escape(self._arguments)}")
        growing = f"{_beginning(self._id)}|(?:{id})?{_beginning(self._arguments)}"
        self._begun = re.compile(f"{_NAME}(?:{growing})\\s*$")

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        body = text[start:]
        if not body.strip() and not final:
            return None
        name = None  # of a call whose arguments follow it; else the JSON has it
        arguments = start
        if not body.lstrip().startswith(("[", "{")):
            head = self._head.match(text, start)
            if head is None:
                return no_call(start, final=final or self._begun.match(body) is None)
            name = head[1]
            arguments = head.end()
        try:
            value, end = leading_value(text, arguments)
        except UnfinishedError:
            return no_call(start, final=final)
        except ValueError:
            return Reading(start)
        if name is not None:
            value = {"name": name, "arguments": value}
        calls = calls_of(value)
        if not calls:
            return Reading(start)
        return Reading(end, calls)

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return super().cut_calls(text) or cut_json_calls(text, json_head())

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        if self._lists:
            return json_list_rules(tools, parallel=self.parallel)
        middle = literal(_ARGUMENTS)
        if self._writes_ids:
            middle = f"{literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/ {middle}"
        calls = " | ".join(f"{quoted(tool.name)} {middle} arguments{n}" for n, tool in enumerate(tools))
        return "\n".join([f"rest: {calls}", *arguments_rules(tools)])


# The beginning of a fenced answer, up to its JSON.
_FENCED_JSON = re.compile(r"\s*```(?:json|tool_call|tool_code)?\s*(?=[{\[])")
_OPENINGS = ("```json", "```tool_call", "```tool_code", "```")


class Generic(ToolForm):
    """Models without a form of their own: an answer that is an object or a list of them, maybe in a fence.

    ```json
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    ```

    names: of the tools; the JSON has to name one of them.
    """

    head = json_head()

    begins: Sequence[str] = ()
    bare = True
    rule_begin = ""

    def __init__(self, _marks: MarkupTokens, names: Sequence[str] = ()) -> None:
        self._names = names
        self.names = names

    def read(self, text: str, *, final: bool) -> Reading | None:
        # The JSON begins after a fence, after the comma between two calls, or at once.
        fence = _FENCED_JSON.match(text)
        if fence is None and text.lstrip().startswith("`"):
            start = text.strip()
            growing = any(opening.startswith(start) for opening in _OPENINGS) or start in _OPENINGS
            return no_call(1, final=final or not growing)
        start_of_json = 0
        close = ""
        if fence is not None:
            start_of_json = fence.end()
            close = _FENCE
        elif text.lstrip().startswith(","):  # between calls
            start_of_json = text.find(",") + 1
        try:
            value, position = leading_value(text, start_of_json)
        except UnfinishedError:
            return no_call(1, final=final)
        except ValueError:
            return Reading(1)
        calls = calls_of(value)
        if not calls or not all(call.name in self._names for call in calls):
            return Reading(1)
        return ended(text, position, close, calls=Reading(position, calls), final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return json_rules(tools, '{"name": "%s", "arguments": ', "}", literal(""))


_LONGEST_HEAD = len(MARK) + 128 + 1  # characters: the mark, a name, the end of its line


class Functionary(ToolForm):
    """Functionary 3: a recipient and its arguments; `RecipientStream` writes the mark that the prompt ends with.

    >>>get_weather
    {"city": "Paris"}>>>time
    {}

    tools: by name.
    """

    begins = (MARK,)
    rule_begin = ""  # the prompt has the first mark
    separator = MARK
    head = re.compile(f"{MARK}([A-Za-z0-9_.:/-]{{1,128}})\n\\s*(?={{)")
    markup = Markup(begin=MARK, middle="\n", end="", separator=MARK)

    def __init__(self, _marks: MarkupTokens, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.names = tools.keys()

    def read(self, text: str, *, final: bool) -> Reading | None:
        head = self.head.match(text)
        if head is None:
            name, _, rest = text[len(MARK) :].partition("\n")
            may_go_on = not rest.strip() and any(tool.startswith(name) for tool in self._tools)
            return no_call(len(MARK), final=final or not may_go_on or len(text) >= _LONGEST_HEAD)
        if head[1] not in self._tools:
            return Reading(head.end())
        try:
            value, end = leading_value(text, head.end())
        except UnfinishedError:
            return no_call(len(MARK), final=final)
        except ValueError:
            return Reading(len(MARK))
        return Reading(end, (ToolCall.of(head[1], value),))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:  # noqa: ARG002 - all of it is text
        heads = [quoted(f"{tool.name}\n") for tool in tools]
        calls = [f"call{number}: {head} arguments{number}" for number, head in enumerate(heads)]
        return "\n".join([f"rest: {one_call(tools)}", *calls, *arguments_rules(tools)])


_RECIPIENT = "functions."


class Harmony(ToolForm):
    """Harmony (GPT-OSS): a message to a function, in a channel of its own. Each call ends the turn.

        <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
         to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>

    The detokenizer of thinking (`models.text.thinking_forms`) writes the head of such a message between two characters
    that no text contains.
    """

    begins = (CALL_BEGIN,)
    rule_begin = "<|channel|>"
    text_head = "final<|message|>"
    other_calls = "recipient_first"
    head = re.compile(f"{re.escape(CALL_BEGIN + _RECIPIENT)}([^{CALL_MESSAGE}]+){CALL_MESSAGE}")

    def __init__(self, _marks: MarkupTokens) -> None:
        pass

    def read(self, text: str, *, final: bool) -> Reading | None:
        # CALL_BEGIN, head, CALL_MESSAGE, arguments: the two marks are a character each.
        head, separator, _ = text[1:].partition(CALL_MESSAGE)
        if not separator:
            return no_call(len(text), final=final)
        start = len(head) + 2
        try:
            value, end = leading_value(text, start)
        except UnfinishedError:
            if not final:
                return None
            if text[start:].strip():
                return Reading(len(text))
            value = {}  # a call without any
            end = len(text)
        except ValueError:
            return Reading(start)
        calls = calls_of({"name": head.removeprefix(_RECIPIENT), "arguments": value})
        if not calls:
            return Reading(start)
        return Reading(end, calls)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        channel, constrain, message = map(literal, ("<|channel|>", "<|constrain|>", "<|message|>"))
        rules = [
            f"rest: {one_call(tools)}",
            f"recipient_first: {' | '.join(f'first{number}' for number in range(len(tools)))}",
        ]
        for number, tool in enumerate(tools):
            recipient = f"to={_RECIPIENT}{tool.name}"
            # The template writes the recipient before the channel, the model mostly within it.
            first = f'SPACE? {quoted(recipient)} {channel} "commentary " {constrain}? "json" {message}'
            rules += [
                f'call{number}: {quoted(f"commentary {recipient} ")} {constrain} "json" {message} arguments{number}',
                f"first{number}: {first} arguments{number}",
                arguments_rule(number, tool),
            ]
        return "\n".join(rules)


DEEPSEEK_MARKUP = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
)
_JSON_FENCE = f"\n{_FENCE}json\n"
_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR, _ = DEEPSEEK_MARKUP
_DEEPSEEK_FENCED = Markup(
    begin=f"{_BEGIN}{_CALL}function{_SEPARATOR}",
    middle=_JSON_FENCE,
    end=f"\n{_FENCE}{_CALL_END}{_END}",
    separator=f"\n{_FENCE}{_CALL_END}\n{_CALL}function{_SEPARATOR}",
)
_DEEPSEEK_PLAIN = Markup(
    begin=f"{_BEGIN}{_CALL}",
    middle=_SEPARATOR,
    end=f"{_CALL_END}{_END}",
    separator=f"{_CALL_END}{_CALL}",
)


class DeepSeek(ToolForm):
    """DeepSeek 3, R1 and 3.1; `tagged_forms` has the markup of later ones.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                              3, R1
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...     3.1

    fenced: calls as in 3 and R1, not 3.1.
    """

    def __init__(self, marks: MarkupTokens, *, fenced: bool) -> None:
        self._begin, self._end, self._call, self._call_end, self._separator, _ = map(marks, DEEPSEEK_MARKUP)
        self.begins = (self._begin,)
        self.markup = _DEEPSEEK_FENCED if fenced else _DEEPSEEK_PLAIN
        self._fenced = fenced
        self.rule_begin = _BEGIN
        call = re.escape(self._call)
        separator = re.escape(self._separator)
        name = f"{call}(?:function{separator})?([\\w.:/-]+)(?:{separator}|\\n{_FENCE}json\\n)(?={{)"
        self.head = re.compile(name)

    def read(self, text: str, *, final: bool) -> Reading | None:
        position = len(self._begin)
        calls: list[ToolCall] = []
        while True:
            rest = text[position:].lstrip()
            position = len(text) - len(rest)
            if rest.startswith(self._end):
                return Reading(position + len(self._end), tuple(calls))
            if not rest.startswith(self._call):
                if not final and (self._end.startswith(rest) or self._call.startswith(rest)):
                    return None
                return Reading(position, tuple(calls))
            parsed = self._read_call(text, position + len(self._call))
            if parsed is None and not final:
                return None
            if parsed is None:
                return Reading(position, tuple(calls))
            call, position = parsed
            calls.append(call)

    def _read_call(self, text: str, position: int) -> tuple[ToolCall, int] | None:
        """Return the call that begins at `position`, and the position after it; None if it is incomplete or none."""
        separator = text.find(self._separator, position)
        if separator < 0:
            return None
        name = text[position:separator].strip()
        start = separator + len(self._separator)
        # 3 and R1: the name stands after the separator, and the arguments in a fence.
        fence = text.find(f"{_FENCE}json", start)
        if fence >= 0 and name == "function":
            name = text[start:fence].strip()
            start = fence + len(f"{_FENCE}json")
        try:
            value, end = leading_value(text, start)
        except (UnfinishedError, ValueError):
            return None
        closed = text.find(self._call_end, end)
        if closed < 0 or not isinstance(value, dict):
            return None
        return ToolCall.of(name, value), closed + len(self._call_end)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        begin = literal(_CALL)
        end = literal(_CALL_END)
        separator = literal(_SEPARATOR)
        calls: list[str] = []
        for number, tool in enumerate(tools):
            if self._fenced:
                head = f'"function" {separator} {quoted(f"{tool.name}{_JSON_FENCE}")}'
                calls.append(f'call{number}: {head} arguments{number} "\\n```"')
            else:
                calls.append(f"call{number}: {quoted(tool.name)} {separator} arguments{number}")
        rule = f"one: {begin} ({one_call(tools)}) {end}"
        between = '"\\n"' if self._fenced else ""
        more = ""
        if self.parallel:
            more = f"({between} one)*"
        rest = f"rest: one {more} {literal(_END)}"
        return "\n".join([rest, rule, *calls, *arguments_rules(tools)])
