"""Grammars of a request's tool calls."""

import json
from dataclasses import replace

from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.structured.schema_check import schema_text
from headrace.models.text.tools.form import ToolForm
from headrace.models.text.tools.grammar import CallRules, call_rules
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.errors import UsageError

_UNMARKED = "calls without markup are checked only if they are forced"


def calls_grammar(grammars: Grammars, use: ToolUse, form: ToolForm) -> tuple[CallRules | None, dict[str, str]]:
    """Return the rules of a request's calls, and the tools whose calls may have any arguments, with the reason.

    These are optional ones of a schema that cannot be honoured, or of a form without markup. Raises UsageError for a
    forced or strict tool of such a schema.
    """
    tools = dict(use.tools)
    unchecked = dict[str, str]()
    if not (use.is_forced or form.rule_begin):
        unchecked = {tool.name: _UNMARKED for tool in use.callable}
    for tool in use.callable if use.is_forced or form.rule_begin else ():
        if (reason := grammars.refusal(tool.schema)) is None:
            tools[tool.name] = replace(tool, parameters=json.loads(schema_text(tool.schema, masks_spell_keys=False)))
            continue
        if use.is_forced or tool.strict:
            raise UsageError(f"tool {tool.name}: {reason}")
        tools[tool.name] = replace(tool, free=True)
        unchecked[tool.name] = reason
    return call_rules(form, use.with_tools(tools), grammars.literal), unchecked
