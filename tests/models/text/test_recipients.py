"""Recipients of an answer's parts: the user is left out, tools begin calls."""

from pathlib import Path

import pytest

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
