"""The form of each model's tool calls, by the markup in its chat template. The first that fits counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools import deepseek, gemma, glm, granite, hermes, llama, mistral
from headrace.models.text.tools.call import Tool
from headrace.models.text.tools.form import Marks, ToolForm
from headrace.models.text.tools.generic import Generic
from headrace.models.text.tools.harmony import Harmony
from headrace.models.text.tools.qwen_coder import QwenCoder
from headrace.models.text.tools.use import ToolUse

_MARKUP = [
    text
    for markup in (
        *(hermes.MARKUP, glm.MARKUP, granite.MARKUP, llama.MARKUP, mistral.MARKUP, deepseek.MARKUP),
        *(gemma.MARKUP, gemma.OLDER),
    )
    for text in markup
]
Maker = Callable[[Marks, Mapping[str, Tool], str], ToolForm]
"""Makes a form of the markup, the tools by name and the chat template's source."""

FORMS: dict[str, tuple[tuple[str, ...], Maker]] = {
    "harmony": (("<|channel|>", "<|message|>", "to=functions."), lambda marks, _, __: Harmony(marks)),
    "deepseek": (("tool▁calls▁begin",), lambda marks, tools, source: _deepseek(marks, tools, source)),
    "deepseek tagged": (("｜DSML｜",), lambda marks, tools, source: _deepseek(marks, tools, source)),
    "mistral": (("[TOOL_CALLS]",), lambda marks, _, __: mistral.Mistral(marks)),
    "gemma": (("<|tool_call>", "<tool_call|>"), lambda marks, _, __: gemma.Gemma(marks)),
    "function gemma": (("<start_function_call>",), lambda marks, _, __: gemma.Gemma(marks, gemma.OLDER)),
    "glm": (("<arg_key>",), lambda marks, tools, _: glm.GLM(marks, tools)),
    "qwen coder": (("<tool_call>", "<function="), lambda marks, tools, _: QwenCoder(marks, tools)),
    "granite": (("<|tool_call|>",), lambda marks, _, __: granite.Granite(marks)),
    "hermes": (("<tool_call>",), lambda marks, _, __: hermes.Hermes(marks)),
    "llama": (("<|start_header_id|>", "parameters"), lambda marks, tools, _: llama.Llama(marks, list(tools))),
    "generic": ((), lambda marks, tools, _: Generic(marks, list(tools))),
}
"""Name -> texts that the template has to contain, and the form."""


def form_name(source: str) -> str:
    """Return the name of the form that a chat template's source is written in."""
    return next(name for name, (texts, _) in FORMS.items() if all(text in source for text in texts))


@dataclass(frozen=True, slots=True)
class FormOfTools:
    """The form of one request's tools, and its control tokens."""

    form: ToolForm
    marks: Marks


def form_of(tokenizer: Tokenizer, use: ToolUse) -> FormOfTools:
    """Return the form in which a model calls the tools of a request."""
    source = tokenizer.template_source
    marks = Marks(_MARKUP, tokenizer.token_id, tokenizer.detokenizers.special)
    return FormOfTools(FORMS[form_name(source)][1](marks, use.tools, source), marks)


def _deepseek(marks: Marks, tools: Mapping[str, Tool], source: str) -> ToolForm:
    tagged = "tool▁calls▁begin" not in source
    return deepseek.DeepSeek(marks, tools, fenced="```json" in source, tagged=tagged)
