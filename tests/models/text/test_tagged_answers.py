"""Answers whose thinking, text and calls have tags around them, as in Kimi K3."""

import json
from pathlib import Path

import pytest

from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.thinking import read_tags
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.table import form_of
from headrace.models.text.tools.use import ToolUse
from tests.support.tiny_chat import write_byte_tokenizer

TEMPLATE = """
{%- macro tag(text) -%}<|open|>{{ text }}<|sep|>{%- endmacro -%}
{%- macro end(text) -%}<|close|>{{ text }}<|sep|>{%- endmacro -%}
{%- set thinks = thinking | default(true) -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for m in messages -%}{{ tag('message role="' + m.role + '"') }}
    {%- if m.role == 'assistant' -%}
        {%- if thinks -%}{{ tag('think') }}{{ m.reasoning_content or '' }}{{ end('think') }}{%- endif -%}
        {{ tag('response') }}{{ m.content or '' }}{{ end('response') }}
        {%- if m.tool_calls -%}{{ tag('tools') }}
            {%- for call in m.tool_calls -%}
                {{ tag('call tool="' + call.function.name + '" index="' + (loop.index | string) + '"') }}
                {%- for key, value in call.function.arguments.items() -%}
                    {{ tag('argument key="' + key + '" type="string"') }}{{ value }}{{ end('argument') }}
                {%- endfor -%}{{ end('call') }}
            {%- endfor -%}{{ end('tools') }}
        {%- endif -%}
    {%- else -%}{{ m.content }}{%- endif -%}
    {{ end('message') }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ tag('message role="assistant"') }}{{ tag('think') if thinks else tag('response') }}
{%- endif -%}"""
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}, "required": ["at"]}},
}
TOOLS = ToolUse([LOOK])
CALLS = "".join(
    f'<|open|>call tool="look" index="{number}"<|sep|><|open|>argument key="at" type="string"<|sep|>{at}'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
    for number, at in ((1, "a b"), (2, "c"))
)
THOUGHT = "Hm, think.<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|>"
TEXT = f"{THOUGHT}Well.{END}"
CALL = f"{THOUGHT}I look.<|close|>response<|sep|><|open|>tools<|sep|>{CALLS}<|close|>tools<|sep|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_byte_tokenizer(tmp_path, "<|open|>", "<|close|>", "<|sep|>")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(tmp_path)


def read(tokenizer: Tokenizer, answer: str, *, thinks: bool = True) -> tuple[str, list[str]]:
    """Return the text and the arguments of calls in an answer."""
    form = form_of(tokenizer, TOOLS)
    stream = ToolStream(form.form, form.marks, thinking=thinks)
    detokenizer = tokenizer.answer_stream(form.marks.character_of, thinks=thinks)
    text = ""
    calls = []
    for token in tokenizer.encode(answer, special=True):
        released, completed = stream.feed(detokenizer.add(token))
        text += released
        calls += completed
    released, completed = stream.finish(detokenizer.finish())
    return text + released, [call.arguments for call in (*calls, *completed)]


@pytest.mark.parametrize("end", ["", "<|close|>message<|sep|>"])
def test_thinking_text_and_calls_come_apart(tokenizer: Tokenizer, end: str) -> None:
    text, arguments = read(tokenizer, CALL + end)
    assert text == "Hm, think.\n</think>\n\nI look."
    assert list(map(json.loads, arguments)) == [{"at": "a b"}, {"at": "c"}]


def test_no_tag_is_left_around_a_text(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, TEXT) == ("Hm, think.\n</think>\n\nWell.", [])
    assert read(tokenizer, f"Well.{END}", thinks=False) == ("Well.", [])
    stream = tokenizer.answer_stream(thinks=True)
    text = "".join(map(stream.add, tokenizer.encode(TEXT, special=True))) + stream.finish()
    assert text == "Hm, think.\n</think>\n\nWell."


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_grammars_have_the_tags(tokenizer: Tokenizer, choice: str) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    use = ToolUse([LOOK], choice)
    rules = grammars.call_rules(use, form_of(tokenizer, use).form)[0]
    answers = [CALL.replace("I look.", "") + "<|close|>message<|sep|>"]
    if choice == "auto":
        answers += [TEXT, CALL + "<|close|>message<|sep|>", f"{THOUGHT}Well."]
    for answer in answers:
        constraint = grammars.compile(None, "open", "", rules).start()
        tokens = tokenizer.encode(answer, special=True)
        assert constraint.allowed(tokens) == len(tokens)
        constraint.accept(tokens)
        assert constraint.masks([]).tolist()[0][grammars.trie.ends[0]]
    if choice == "required":
        constraint = grammars.compile(None, "open", "", rules).start()
        assert constraint.allowed(tokenizer.encode(f"{THOUGHT}W", special=True)) == len(
            tokenizer.encode(THOUGHT, special=True)
        )


def test_an_answer_continues_in_its_tags(tokenizer: Tokenizer) -> None:
    prompts = ChatPrompt(tokenizer)
    asked = [{"role": "user", "content": "2+2?"}]
    start = prompts.encode(asked)
    assert prompts.opening(start) == "<think>\n"
    assert not prompts.opening(prompts.encode(asked, thinking=False))
    for answer, written in (
        ("<think>\nHm", "Hm"),
        ("<think>\nHm, think.\n</think>\n\nWe", f"{THOUGHT}We"),
        ("We", f"{THOUGHT.removeprefix('Hm, think.')}We"),
    ):
        assert tokenizer.decode(prompts.encode(asked, read_tags(answer))[len(start) :], skip_special=False) == written
    plain = prompts.encode(asked, thinking=False)
    rest = prompts.encode(asked, read_tags("We"), thinking=False)[len(plain) :]
    assert tokenizer.decode(rest, skip_special=False) == "We"
