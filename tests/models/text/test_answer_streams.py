"""Streams of answers: the user is left out as a recipient, tools begin calls; tags around an answer go, others stay."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.models.text.answer_streams import ResponseStream, asks_for_tags
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.table import form_of
from headrace.models.text.tools.use import ToolUse
from tests.support.tiny_chat import write_byte_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]>>>all\n{{ m.content }}{% endfor %}[assistant]>>>"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("all\nHello", "Hello"),
        ("all\n", ""),
        ("all", "all"),
        ("all is well", "all is well"),
        ("Hello\n{", "Hello\n{"),
        ("all\nPrompt: >>> 1\n>>>al", "Prompt: >>> 1\n>>>al"),
        ("all\nOne>>>all\nTwo", "OneTwo"),
        ("", ""),
    ],
)
def test_a_user_recipient_is_not_text_of_the_answer(tokenizer: Tokenizer, answer: str, text: str) -> None:
    stream = tokenizer.answer_stream()
    assert "".join(map(stream.add, tokenizer.encode(answer))) + stream.finish() == text


@pytest.mark.parametrize(
    ("answer", "text", "names"),
    [
        ("look\n{}", "", ["look"]),
        ("look\n{}>>>look\n{}", "", ["look", "look"]),
        ("all\nLet me.>>>look\n{}", "Let me.", ["look"]),
        ("look\n{}>>>all\nDone.", "Done.", ["look"]),
        ("all\nlook\n{}", "look\n{}", []),
        ("all\n>>>other\n{}", ">>>other\n{}", []),
        ("all\n>>> look\n", ">>> look\n", []),
        ("all\n>>>look", ">>>look", []),
    ],
)
def test_a_tool_as_recipient_is_a_call(tokenizer: Tokenizer, answer: str, text: str, names: list[str]) -> None:
    form = form_of(tokenizer, ToolUse([LOOK]))
    detokenizer = tokenizer.answer_stream(form.marks.character_of)
    stream = ToolStream(form.form, form.marks)
    released = ""
    calls = []
    for token in tokenizer.encode(answer):
        more, completed = stream.feed(detokenizer.add(token))
        released += more
        calls += completed
    more, completed = stream.finish(detokenizer.finish())
    calls += completed
    assert released + more == text
    assert [call.name for call in calls] == names


@pytest.mark.parametrize("size", [1, 4, 99])
@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("<think>hm</think>\n<response>\nYes.</response>", "<think>hm</think>Yes."),
        ("<response>Yes.\n</response>\n", "Yes.\n"),
        ("<think>a <response> tag</think>No.", "<think>a <response> tag</think>No."),
        ("Write <response>x</response>", "Write <response>x</response>"),
        ("<response>Write </response> at the end.</response>", "Write </response> at the end."),
        ("<response>Cut </resp", "Cut </resp"),
        ("<resp", "<resp"),
        ("<think>never ends", "<think>never ends"),
        ("", ""),
    ],
)
def test_response_tags_are_removed(said: str, text: str, size: int) -> None:
    pieces = [said[at : at + size] for at in range(0, len(said), size)]
    inner: Any = SimpleNamespace(add=pieces.__getitem__, finish=lambda **_: "")
    stream = ResponseStream(inner)
    assert "".join(map(stream.add, range(len(pieces)))) + stream.finish() == text


def test_a_template_asks_for_them() -> None:
    assert asks_for_tags("Write your response between <response></response> tags.")
    assert not asks_for_tags("{{ '<tool_response>' }}</tool_response>")
