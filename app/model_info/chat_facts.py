"""Facts about a model's chat template for `models show`: its system messages, its tool calls and its thinking.

Only facts that `models/text/template_rules.py` finds by rendering; nothing is looked up by a model's name.

Guard: tests/app/model_info/test_chat_facts.py.
"""

from pathlib import Path
from typing import Any

from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.thinking import OPEN
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.table import form_name_of
from headrace.runtime.errors import HeadraceError

_SYSTEM = {  # words for `system` of `chat_facts`
    "anywhere": "system messages anywhere",
    "first": "one system message, at the beginning",
    "user": "no system messages: they become text of the user's",
}
# Words for two results of `form_name_of`; every other one is the name of a form.
_CALLS = {"generic": "as plain JSON", "its own": "in its own form"}


def chat_facts(path: Path) -> dict[str, object] | None:
    """Return what the template of a model's directory shows; None without one that can be rendered.

    system: `anywhere`, `first` or `user`, where system messages may stand.
    tools: True if the template writes their definitions.
    calls: the form of tool calls.
    thinking: the text that begins it; None for a model that does not think.
    thinking_levels: True if there are levels of thinking.
    """
    try:
        tokenizer = Tokenizer.load(path)
        if tokenizer.chat_template is None:
            return None
        rules = TemplateRules(tokenizer.chat_template)
        with_tools = TemplateRules(tokenizer.chat_template, offers_tools=True)
        prompts = ChatPrompt(tokenizer)
        thinking = None
        if prompts.thinks:
            form = tokenizer.thinking_form
            thinking = OPEN if form is None else form.opening
        if rules.takes_later_system:
            system = "anywhere"
        elif rules.takes_system:
            system = "first"
        else:
            system = "user"
        return {
            "system": system,
            "tools": with_tools.takes_tools,
            "calls": form_name_of(tokenizer),
            "thinking": thinking,
            "thinking_levels": prompts.has_levels,
        }
    except HeadraceError:  # reported by the commands that need the template
        return None


def chat_line(facts: dict[str, Any] | None) -> str:
    """Return the facts that `chat_facts` returns as one line."""
    if facts is None:
        return "no template that can be rendered: `run --raw` continues a text"
    offered = "tools"
    if not facts["tools"]:
        offered = "tools in a text of headrace's"
    form = _CALLS.get(facts["calls"], f"in {facts['calls']} form")
    thinking = "does not think"
    if facts["thinking"]:
        thinking = f"thinks in {facts['thinking']}"
        if facts["thinking_levels"]:
            thinking += ", with levels"
    return f"{_SYSTEM[facts['system']]}; {offered}, calls {form}; {thinking}"
