"""The form of each model's tool calls, by its chat template. `_form_and_markup` takes the first of these that it finds:

1. the first row of FORMS, but for `generic`, that fits a call which the template writes,
2. the markup that is learned from such calls (`written.py`),
3. the first row of FORMS that fits the template's source, or that call.

There are three exceptions. A row of _LEARNED in step 1 leads to the learned markup, if there is one. A row of
_UNLEARNED in step 3 goes before step 2. Where nothing fits, a model may have `pythonic` by its vocabulary
(`pythonic.fits`).

`form_of` is for requests with tools, `write_calls` for earlier calls in a prompt. A new family is a row of FORMS,
before any row whose texts its templates have too, the control tokens that its form reads in _MARKUP, and a case in
`tests/models/text/tools/test_forms.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from msgspec import Struct

from headrace.models.text.answer_streams import MARK
from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools import gemma, json_forms, llama, nested, pythonic, tagged_forms
from headrace.models.text.tools.call import Tool
from headrace.models.text.tools.form import MarkupTokens, ToolForm
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.use import ToolUse
from headrace.models.text.tools.written import KEYS, NAMES, VALUES, Calls, Written, learn

# Control tokens that are characters in the texts that forms read (`MarkupTokens`). `form_of` adds those of learned
# markup.
_MARKUP = [
    *json_forms.HERMES_MARKUP,
    *tagged_forms.GLM_TAGS,
    *json_forms.GRANITE_MARKUP,
    *llama.MARKUP,
    *json_forms.MISTRAL_MARKUP,
    *json_forms.DEEPSEEK_MARKUP,
    *gemma.MARKUP,
    *gemma.OLDER,
    *pythonic.MARKUP,
    *nested.MARKUP,
]
Maker = Callable[[MarkupTokens, Mapping[str, Tool], str], ToolForm]
"""Makes a form of the markup, the tools by name and the chat template's source."""


def _python_list(marks: MarkupTokens, tools: Mapping[str, Tool], source: str) -> ToolForm:
    """Return the form of a Llama with a template that writes calls as Python does."""
    tags = llama.TAGS_3
    if "<|header_start|>" in source:
        tags = llama.TAGS_4
    return llama.Llama(marks, tools, tags, writes_lists=True)


def _mistral(marks: MarkupTokens, _tools: Mapping[str, Tool], source: str) -> ToolForm:
    """Return Mistral's form, with identifiers if the template writes them."""
    return json_forms.Mistral(marks, writes_ids=json_forms.CALL_ID in source)


def _deepseek(marks: MarkupTokens, _tools: Mapping[str, Tool], source: str) -> ToolForm:
    """Return the form of DeepSeek 3, R1 or 3.1: that of the former two has a fence."""
    return json_forms.DeepSeek(marks, fenced="```json" in source)


def _deepseek_tagged(marks: MarkupTokens, tools: Mapping[str, Tool], source: str) -> ToolForm:
    """Return the form of DeepSeek 3.2 or 4: their tags around calls have different names."""
    section = "function_calls"
    if "｜DSML｜tool_calls" in source:
        section = "tool_calls"
    return Written(marks, tools, tagged_forms.deepseek_markup(section))


# The first row that fits counts. The templates of `glm` and `qwen coder` have the text of `hermes`, too, and `generic`
# fits all. `_LEARNED` and `_UNLEARNED` have the exceptions.
FORMS: dict[str, tuple[tuple[str, ...], Maker]] = {
    "harmony": (("<|channel|>", "<|message|>", "to=functions."), lambda marks, _, __: json_forms.Harmony(marks)),
    "deepseek": (("tool▁calls▁begin",), _deepseek),
    "deepseek tagged": (("｜DSML｜",), _deepseek_tagged),
    "mistral": (("[TOOL_CALLS]",), _mistral),
    "gemma": (("<|tool_call>", "<tool_call|>"), lambda marks, tools, _: gemma.Gemma(marks, tools)),
    "function gemma": (("<start_function_call>",), lambda marks, tools, _: gemma.Gemma(marks, tools, gemma.OLDER)),
    "nested": ((nested.BEGIN,), lambda marks, tools, _: nested.Nested(marks, tools)),
    "glm": (("<arg_key>",), lambda marks, tools, _: Written(marks, tools, tagged_forms.GLM)),
    "qwen coder": (("<tool_call>", "<function="), lambda marks, tools, _: tagged_forms.QwenCoder(marks, tools)),
    "granite": (("<|tool_call|>",), lambda marks, _, __: json_forms.Granite(marks)),
    "hermes": (("<tool_call>",), lambda marks, _, __: json_forms.Hermes(marks)),
    "muse": (("to=self<|message|>",), lambda marks, tools, _: tagged_forms.Muse(marks, tools)),
    "functionary": ((f"{MARK}all",), lambda marks, tools, _: json_forms.Functionary(marks, tools)),
    "llama": (("<|start_header_id|>", "parameters"), lambda marks, tools, _: llama.Llama(marks, tools)),
    "llama 4": (("<|header_start|>",), lambda marks, tools, _: llama.Llama(marks, tools, llama.TAGS_4)),
    "pythonic": ((pythonic.BEGIN,), lambda marks, tools, _: pythonic.Pythonic(marks, tools)),
    "python list": ((f"[{NAMES[0]}(",), _python_list),
    "generic": ((), lambda marks, tools, _: json_forms.Generic(marks, list(tools))),
}
"""Name -> texts that the template has to contain, and the form."""

# Forms of which a template's own markup is used, since it differs from model to model, if the template writes calls.
_LEARNED = frozenset(["glm", "deepseek tagged"])

# Llama 4 writes other calls than the templates that are used with it.
_UNLEARNED = frozenset(["llama 4"])


def form_name(source: str) -> str:
    """Return the name of the form that a chat template's source, or the calls that it writes, are in."""
    return next(name for name, (texts, _) in FORMS.items() if all(text in source for text in texts))


class FormOfTools(Struct, frozen=True):
    """The form of one request's tools, and its control tokens."""

    form: ToolForm
    marks: MarkupTokens


def form_of(tokenizer: Tokenizer, use: ToolUse) -> FormOfTools:
    """Return the form in which a model calls the tools of a request.

    The module's docstring has the order of precedence.
    """
    # The form, and the characters that stand for its control tokens.
    name, markup = _form_and_markup(tokenizer)
    source = f"{tokenizer.template_source}\n{_template_calls(tokenizer).call}"
    texts = list(_MARKUP)
    if markup is not None:
        texts += tokenizer.special_texts_in("\n".join(markup.texts))
    marks = MarkupTokens(texts, tokenizer.token_id, tokenizer.detokenizers.special)
    form: ToolForm
    if markup is not None:
        form = Written(marks, use.tools, markup)
    else:
        _, make = FORMS[name]
        form = make(marks, use.tools, source)
    form.parallel = use.parallel

    # Texts that depend on the template: after an answer's text, and between calls.
    thinking = tokenizer.thinking_form
    if thinking is not None and thinking.has_tags and form.rule_begin.startswith(thinking.end_of_text):
        form.end_of_text = thinking.end_of_text
        form.end_of_answer = thinking.end_of_answer
    learned = _template_calls(tokenizer).markup
    if markup is None and form.separator is not None and learned is not None and learned.between_calls is not None:
        form.separator = learned.between_calls
    return FormOfTools(form, marks)


def write_calls(tokenizer: Tokenizer, calls: Sequence[Mapping[str, object]]) -> str:
    """Return calls {"name": ..., "arguments": {...}} in a model's form, for a template that shows none."""
    return form_of(tokenizer, ToolUse([])).form.write(calls)


def form_name_of(tokenizer: Tokenizer) -> str:
    """Return the name of a model's form; `its own` for one that was learned from its template."""
    name, markup = _form_and_markup(tokenizer)
    if markup is not None:
        return "its own"
    return name


def _form_and_markup(tokenizer: Tokenizer) -> tuple[str, Markup | None]:
    """Return the name of a row of FORMS, and None; or any name, and the learned markup that is used in place of a row.

    The module's docstring has the order. Every template that takes calls writes one.
    """
    template = _template_calls(tokenizer)
    name = form_name(template.call)
    if name in _LEARNED:
        return name, template.markup
    if name != "generic":
        return name, None
    by_source = form_name(f"{tokenizer.template_source}\n{template.call}")
    if template.markup is not None and by_source not in _UNLEARNED:
        return name, template.markup
    if by_source == "generic" and pythonic.fits(tokenizer):
        return "pythonic", None  # LFM2's templates show no call
    return by_source, None


class _TemplateCalls(Struct, frozen=True):
    """The calls that a chat template writes."""

    call: str  # one call as the template writes it; "" for none
    markup: Markup | None


# By the tokenizer, as long as that exists.
_template_calls_of: WeakKeyDictionary[Tokenizer, _TemplateCalls] = WeakKeyDictionary()


def _template_calls(tokenizer: Tokenizer) -> _TemplateCalls:
    """Return the calls that a chat template writes, rendered once."""
    if tokenizer not in _template_calls_of:
        call = ""
        markup = None
        if tokenizer.chat_template is not None:
            rules = TemplateRules(tokenizer.chat_template, offers_tools=True)
            if rules.takes_calls:
                render = partial(_render_calls, tokenizer, rules)
                call = render([(NAMES[0], {KEYS[0]: VALUES[0]})]) or ""
                markup = learn(render)
        _template_calls_of[tokenizer] = _TemplateCalls(call, markup)
    return _template_calls_of[tokenizer]


def _render_calls(tokenizer: Tokenizer, rules: TemplateRules, calls: Calls) -> str | None:
    """Return calls as the template writes them, without the end of the turn and all that follows it.

    The turn ends with the first end token, or token that begins turns, after the name in the last call.
    """
    text = rules.written_calls(calls)
    if text is None:
        return None
    last_call = max(0, text.rfind(calls[-1][0]))
    marks = [tokenizer.token_text(index) for index in tokenizer.eos_ids]
    # A token that begins turns, unless it is one of all markup, as in Kimi K3.
    turn_begins = tokenizer.special_texts_in(rules.generation_prompt)
    marks += [mark for mark in turn_begins if rules.generation_prompt.startswith(mark) and mark not in text[:last_call]]
    # -1: the text does not have the mark. 0: the text begins with it (and lacks the name), so nothing would be left.
    ends = [text.find(mark, last_call) for mark in marks]
    return text[: min((end for end in ends if end > 0), default=len(text))]
