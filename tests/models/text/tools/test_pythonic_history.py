"""LFM2's templates show no calls: earlier ones are written as the model writes them, with its control tokens."""

import json
from pathlib import Path

from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.pythonic import MARKUP
from headrace.models.text.tools.table import form_of, write_calls
from headrace.models.text.tools.use import ToolUse
from tests.support.tiny_chat import write_byte_tokenizer

TEMPLATE = """{% if tools %}List of tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_calls_of_the_history_are_in_the_models_form(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, *MARKUP)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path)

    arguments = {"city": 'Paris "<|tool_call_end|>"', "days": 3, "now": True}
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}},
        {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "dull"},
    ]
    prompt = ChatPrompt(tokenizer).encode(messages, tools=ToolUse([WEATHER]))
    written = (
        'I look.\n<|tool_call_start|>[weather(city="Paris \\"<|tool_call_end|>\\"", days=3, now=True), weather()]'
        "<|tool_call_end|><|im_end|>"
    )
    assert written in tokenizer.decode(prompt, skip_special=False)
    assert [prompt.count(index) for index in (260, 261)] == [1, 1]  # the argument's is text


def test_the_grammar_of_forced_calls_accepts_what_the_history_has(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, *MARKUP)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path)
    properties = {"city": {"type": ["string", "null"]}, "tags": {"type": "array", "items": {"type": "string"}}}
    weather = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
    use = ToolUse([{"type": "function", "function": weather}], "required")
    text = write_calls(tokenizer, [{"name": "weather", "arguments": {"city": None, "tags": ['a"', "é"]}}])
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    constraint = grammars.compile(None, "no", "", grammars.call_rules(use, form_of(tokenizer, use).form)[0]).start()
    tokens = tokenizer.encode(text, special=True)
    assert constraint.allowed(tokens) == len(tokens)
