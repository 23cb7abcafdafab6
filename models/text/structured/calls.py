"""Grammars of a request's tool calls."""

import json
from dataclasses import replace

from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.structured.schema_check import schema_text
from headrace.models.text.tools.form import ToolForm
from headrace.models.text.tools.grammar import CallRules, call_rules
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.errors import UsageError


def calls_grammar(grammars: Grammars, use: ToolUse, form: ToolForm) -> CallRules | None:
    """Return the rules of a request's calls. Optional calls of a schema that cannot be honoured may have any arguments.

    Raises UsageError for a forced or strict tool of such a schema.
    """
    tools = dict(use.tools)
    for tool in use.callable if use.is_forced or form.rule_begin else ():
        if (reason := grammars.refusal(tool.schema)) is None:
            tools[tool.name] = replace(tool, parameters=json.loads(schema_text(tool.schema)))
            continue
        if use.is_forced or tool.strict:
            raise UsageError(f"tool {tool.name}: {reason}")
        tools[tool.name] = replace(tool, free=True)
    return call_rules(form, use.with_tools(tools), grammars.literal)
