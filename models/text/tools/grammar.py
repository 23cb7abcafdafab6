"""Grammars of tool calls: forced ones, and optional ones from the moment that their markup begins.

`Grammars.call_rules` calls `call_rules`; the rules of one family are in its form (`ToolForm.rules`).

Harmony's answer is a channel, as its calls are, so no text stands outside of markup: its form says so in
`text_head` and `other_calls`.

Guard: tests/models/text/tools/test_forms.py.
"""

from collections.abc import Callable

from msgspec import Struct

from headrace.models.text.tools.form import ToolForm, literal_pattern
from headrace.models.text.tools.use import ToolUse


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
