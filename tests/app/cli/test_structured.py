"""Schemas at every door: the same request gives the same tokens through run, batch and the Python API."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace import load
from headrace.runtime.errors import EngineError, UsageError
from tests.support.commands import headrace
from tests.support.schemas import REAL
from tests.support.tiny_chat import write_chat_model


class Verdict(BaseModel):
    """A class as a schema."""

    label: str | None
    sure: bool


SCHEMA = REAL["sentiment"]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 400}
FLAGS = ("-t", "1", "--seed", "3", "-n", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_every_interface_gives_the_same_tokens(model: Path, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    run = headrace("run", "-m", model, "Go.", "--schema", file, *FLAGS, home=home, code=0)
    text = run.stdout.rstrip("\n")
    assert json.loads(text)["label"] in ("positive", "negative", "neutral")
    written = headrace("run", "-m", model, "Go.", "--schema", json.dumps(SCHEMA), *FLAGS, "--json", home=home, code=0)
    assert json.loads(written.stdout)["text"] == text
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "Go."}]
    body = {"messages": messages, "response_format": wanted, **SAMPLING}
    lines = [{"prompt": "Go.", "schema": SCHEMA, **SAMPLING}, {"custom_id": "a", "body": body}]
    given = "\n".join(map(json.dumps, lines)).encode()
    batch = headrace("batch", "-m", model, home=home, stdin=given, code=0)
    plain, openai = sorted(map(json.loads, batch.stdout.splitlines()), key=lambda line: "custom_id" in line)
    assert plain["text"] == text
    assert openai["response"]["body"]["choices"][0]["message"]["content"] == text
    with load(str(model)) as loaded:
        answer = loaded.generate("Go.", schema=SCHEMA, **SAMPLING)
        assert answer.text == text
        assert answer.parsed == json.loads(text)
        assert loaded.chat("Go.", schema=SCHEMA, **SAMPLING).parsed == json.loads(text)
        assert [each.text for each in loaded.batch(["Go."], schema=SCHEMA, **SAMPLING)] == [text]


def test_answers_of_run_fit_regular_expressions_and_grammars(model: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "answer.lark").write_text('start: "<" /[ab]{2}/ ">"')
    regex = headrace("run", "-m", model, "Go.", "--regex", "ja|nein", *FLAGS, home=home, code=0)
    assert regex.stdout in ("ja\n", "nein\n")
    grammar = headrace("run", "-m", model, "Go.", "--grammar", tmp_path / "answer.lark", *FLAGS, home=home, code=0)
    assert set(grammar.stdout.strip()) <= set("<>ab")
    assert len(grammar.stdout) == 5
    samples = headrace("run", "-m", model, "Go.", "--regex", "[a-c]{3}", *FLAGS, "--samples", "3", home=home, code=0)
    assert len([line for line in samples.stdout.splitlines() if line and set(line) <= set("abc")]) == 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (("--schema", '{"type": "array"'), "--schema must be JSON"),
        (("--schema", "no-such-file.json"), "no-such-file.json"),
        (("--schema", "[1]"), "[1]"),
        (("--schema", "object", "--regex", "a"), "exclude"),
        (("--regex", "(a"), "regex"),
        (("--grammar", "no-such-file.lark"), "no-such-file.lark"),
    ],
)
def test_refusals_are_one_line(model: Path, home: Path, flags: tuple[str, ...], named: str) -> None:
    done = headrace("run", "-m", model, "Go.", *flags, home=home, code=2)
    assert done.stdout == ""
    assert named in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_an_answer_that_a_limit_cuts_exits_1(model: Path, home: Path) -> None:
    for more in ((), ("--json",), ("--samples", "2")):
        arguments = ("run", "-m", model, "Go.", "--schema", json.dumps(SCHEMA), "-n", "5", "-t", "1", "-q")
        done = headrace(*arguments, *more, home=home, code=1)
        assert "max tokens" in done.stderr
        assert done.stdout


def test_thinking_is_left_out_of_the_answer_that_fits(home: Path, tmp_path: Path) -> None:
    thinking = write_chat_model(tmp_path / "thinking")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<|im_start|>assistant\n<think>\n"
    (thinking / "chat_template.jinja").write_text(template)
    flags = ("--schema", json.dumps(SCHEMA), "--thinking", "5", *FLAGS)
    run = headrace("run", "-m", thinking, "Go.", *flags, home=home, code=0)
    assert set(json.loads(run.stdout)) == {"label", "confidence"}
    document = json.loads(headrace("run", "-m", thinking, "Go.", *flags, "--json", home=home, code=0).stdout)
    assert document["text"].partition("</think>")[2].strip() == run.stdout.strip()


def test_a_pydantic_class_gives_its_instance(model: Path) -> None:
    with load(str(model)) as loaded:
        options: dict[str, Any] = {"schema": Verdict, "temperature": 1.0, "seed": 1}
        answer = loaded.generate("Go.", **options)
        assert isinstance(answer.parsed, Verdict)
        assert json.loads(answer.text).keys() == {"label", "sure"}
        assert isinstance(loaded.chat("Go.", **options).parsed, Verdict)
        with pytest.raises(EngineError):
            loaded.generate("Go.", **options, max_tokens=3)
        with pytest.raises(UsageError):
            loaded.generate("Go.", schema="{")
        assert loaded.generate("Go.", max_tokens=3).parsed is None
