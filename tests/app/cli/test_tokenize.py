"""`headrace tokenize`, in this process, with a tiny model's tokenizer."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.app.cli.tokenize import tokenize
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError
from tests.support.tiny_chat import IM_END, write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))


def invoke(model: Path, *arguments: str, stdin: bytes = b"") -> str:
    options = {"catch_exceptions": False, "standalone_mode": False}
    return CliRunner().invoke(tokenize, [*arguments, "-m", str(model)], input=stdin, **options).stdout  # type: ignore[arg-type]


def test_ids_and_texts_are_the_tokenizers(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    text = "hello there\n"
    document = json.loads(invoke(model, text, "--json"))
    assert [row["id"] for row in document["tokens"]] == tokenizer.encode(text)
    assert "".join(row["text"] for row in document["tokens"]) == text
    assert document["count"] == len(document["tokens"])
    assert json.loads(invoke(model, "--json", stdin=text.encode())) == document
    lines = invoke(model, text).splitlines()
    assert [int(line.split()[0]) for line in lines] == tokenizer.encode(text)
    assert json.loads(lines[-1].split(maxsplit=1)[1]) == document["tokens"][-1]["text"]


def test_control_tokens_only_where_asked_for(model: Path) -> None:
    text = Tokenizer.load(model).decode([IM_END], skip_special=False)
    assert [row["id"] for row in json.loads(invoke(model, text, "--special", "--json"))["tokens"]] == [IM_END]
    assert IM_END not in [row["id"] for row in json.loads(invoke(model, text, "--json"))["tokens"]]


def test_input_that_is_not_utf_8_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="byte 1"):
        invoke(model, "-", stdin=b"a\xff")
