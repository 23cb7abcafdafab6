"""Compilation: thinking before an answer, schemas that are refused, and hostile ones within 2 s."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.models.text.structured.grammar_source import GrammarKind, GrammarSource, schema_text
from headrace.models.text.structured.grammars import MAX_TEXT, Grammars, Thinks
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.form import CallRules
from headrace.models.text.worker import Worker
from headrace.runtime.errors import EngineError, UsageError
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_byte_tokenizer

YES = GrammarSource("regex", "(yes|no)!")


def _grammars(directory: Path, *tokens: str, template: str = "") -> Grammars:
    """Return a vocabulary of bytes with more control tokens."""
    write_byte_tokenizer(directory, *tokens)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(directory)
    return Grammars(tokenizer, tokenizer.vocab_size)


def _fits(grammars: Grammars, thinks: Thinks, *pieces: str) -> bool:
    """Return whether the pieces, control tokens and texts, are a whole answer."""
    constraint = grammars.compile(YES, thinks).start()
    tokenizer = grammars._tokenizer
    for piece in pieces:
        index = tokenizer.token_id(piece)
        tokens = [index] if index is not None and len(piece) > 1 else grammars.trie(piece)
        if constraint.allowed(tokens) < len(tokens):
            return False
        constraint.accept(tokens)
    return bool(constraint.masks([]).tolist()[0][grammars.trie.ends[0]])


@pytest.mark.parametrize("tags", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_the_answer_follows_the_thinking(tmp_path: Path, tags: tuple[str, ...]) -> None:
    grammars = _grammars(tmp_path, *tags)
    assert _fits(grammars, "no", "yes!")
    assert not _fits(grammars, "no", "<think>", "a", "</think>", "yes!")
    for lines in ("", "\n", "\n\n"):
        assert _fits(grammars, "open", "so {no\n", "</think>", lines + "no!")
        assert _fits(grammars, "may", "<think>", "so {no\n", "</think>", lines + "no!")
    assert _fits(grammars, "may", "yes!")
    assert not _fits(grammars, "open", "yes!")
    assert not _fits(grammars, "may", "well, yes!")
    assert not _fits(grammars, "open", "so", "</think>", "well, yes!")


@pytest.mark.parametrize(
    ("opening", "closing"), [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|channel>", "<channel|>")]
)
def test_grammars_have_the_thinking_marks_of_the_family(tmp_path: Path, opening: str, closing: str) -> None:
    grammars = _grammars(tmp_path, opening, closing)
    assert _fits(grammars, "may", opening, "thought\nwell", closing, "yes!")
    assert _fits(grammars, "may", "yes!")
    assert not _fits(grammars, "may", opening, "well", "yes!")


def test_harmony_thinks_in_channels(tmp_path: Path) -> None:
    channel, message, end, start = marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    grammars = _grammars(tmp_path, *marks)
    final = (channel, "final", message)
    thought = (channel, "analysis", message, "so {no", end, start, "assistant")
    assert _fits(grammars, "may", *final, "yes!")
    assert _fits(grammars, "may", *thought, *final, "yes!")
    assert _fits(
        grammars, "may", *thought, channel, "commentary", message, "hm", end, start, "assistant", *final, "no!"
    )
    assert not _fits(grammars, "may", "yes!")
    assert _fits(grammars, "once", *thought, *final, "yes!")
    assert _fits(grammars, "once", *final, "yes!")
    assert _fits(grammars, "may", *thought, *thought, *final, "yes!")
    assert not _fits(grammars, "once", *thought, *thought, *final, "yes!")
    assert not _fits(grammars, "may", *thought, "yes!")


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"type": "string"}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("if", {"if": {"type": "string"}, "then": {"minLength": 2}}),
        ("contains", {"type": "array", "contains": {"type": "string"}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        ("minProperties", {"type": "object", "minProperties": 3}),
        ("const", {"const": 2**60 + 1}),
        ("enum", {"enum": [1, [2**60 + 1]]}),
        ("x-guidance", {"type": "object", "x-guidance": {"lenient": True}}),
        ("$ref", {"$ref": "https://example.com/schema.json"}),
        ("pattern", {"type": "string", "pattern": "(?=a)b"}),
        ("minLength", {"type": "string", "minLength": -1}),
        ("type", {"type": "text"}),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_by_keyword(
    tmp_path_factory: pytest.TempPathFactory, keyword: str, schema: dict[str, Any]
) -> None:
    grammars = _shared(tmp_path_factory)
    for wanted in (schema, {"type": "object", "properties": {"a": {"items": schema}}, "required": ["a"]}):
        if keyword == "x-guidance" and wanted is not schema:
            wanted = {"anyOf": [schema]}
        with pytest.raises(UsageError) as refused:
            grammars.compile(GrammarSource("schema", schema_text(wanted)))
        assert keyword.lower().strip("$") in str(refused.value).lower()
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 300


_kept: list[Grammars] = []


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    if not _kept:
        _kept.append(_grammars(tmp_path_factory.mktemp("shared")))
    return _kept[0]


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


_WIDE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": f"^(a{i}|b){{1,50}}$"} for i in range(900)},
}
MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": 3719}, {"multipleOf": 7919}]}  # compiled for minutes
HOSTILE: dict[str, tuple[str, Any]] = {
    "deep": ("schema", _nested(5000)),
    "multiples": ("schema", MULTIPLES),
    "long strings": ("schema", {"type": "string", "minLength": 10**9}),
    "many items": ("schema", {"type": "array", "items": {"type": "array", "minItems": 10**9}, "minItems": 10**9}),
    "many options": ("schema", {"allOf": [{"anyOf": [{"maxLength": n}, {"minLength": n}]} for n in range(40)]}),
    "wide": ("schema", _WIDE),
    "large": ("schema", {"enum": ["x" * 999] * 999}),
    "circular": ("schema", {"$ref": "#"}),
    "repeated": ("regex", "(((a{1,999}){1,999}){1,999}){1,999}"),
    "brackets": ("regex", "(" * 100_000),
    "backtracking": ("regex", "(a|aa)*(b|bb)*" * 2000),
    "rules": (
        "grammar",
        "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(500)) + '\na: a0\na500: "x"',
    ),
    "parentheses": ("grammar", "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "options": ("grammar", "start: " + " | ".join(f'"{i}"' for i in range(30_000))),
    "left recursion": ("grammar", "start: start start | "),
    "no start": ("grammar", "begin: /a/"),
    "backtrack": ("grammar", 'start: a "b"\na[stop="x"]: /.*/'),
    "counted": ("grammar", "start: a\na[max_tokens=3]: /.*/"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_one_line_in_time(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """It is refused, or compiled and then as fast as others."""
    grammars = _shared(tmp_path_factory)
    kind, text = HOSTILE[name]
    started = time.process_time()
    refused = ""
    try:
        source = GrammarSource(kind, schema_text(text) if kind == "schema" else text)  # type: ignore[arg-type]
        constraint = grammars.compile(source).start()
        for _ in range(20):
            [row] = constraint.masks([]).tolist()
            if (token := row.index(True)) in grammars.trie.ends:
                break
            constraint.accept([token])
    except (UsageError, EngineError) as error:
        refused = str(error)
    assert time.process_time() - started < PATIENCE_S
    assert "\n" not in refused
    assert len(refused) < 300


def test_without_a_process_for_trials_grammars_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the interpreter does not find its libraries that way."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    grammars = _grammars(tmp_path)
    for schema in ({"type": "integer"}, {"type": "string"}):
        assert grammars.refusal(schema) is None


def _worker(grammars: Grammars) -> Worker:
    assert grammars._trial._worker is not None
    return grammars._trial._worker


def test_a_process_for_trials_that_ended_is_replaced(tmp_path: Path) -> None:
    """Its end, while it had no grammar, says nothing about the next one."""
    grammars = _grammars(tmp_path)
    assert grammars.refusal({"type": "integer"}) is None
    first = _worker(grammars)
    first.process.kill()
    first.process.wait(PATIENCE_S)
    assert grammars.refusal({"type": "string"}) is None
    assert _worker(grammars) is not first


def test_ctrl_c_during_a_trial_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the answer about its grammar would be taken for one about the next."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    grammars = _grammars(tmp_path)
    assert grammars.refusal({"type": "integer"}) is None
    first = _worker(grammars)
    monkeypatch.setattr(Worker, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grammars.refusal(MULTIPLES)
    monkeypatch.undo()
    assert first.has_ended
    assert grammars.refusal({"type": "string"}) is None


def test_patterns_that_cannot_be_joined_are_refused_in_words(tmp_path_factory: pytest.TempPathFactory) -> None:
    schema = {"allOf": [{"type": "string", "pattern": f"^[a-z]{{{n},20}}.*{n}"} for n in range(1, 5)]}
    with pytest.raises(UsageError, match=r"^schema: these patterns are too complex to hold together"):
        _shared(tmp_path_factory).compile(GrammarSource("schema", schema_text(schema)))


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_lone_surrogate_is_refused(kind: GrammarKind, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(UsageError, match=f"the {kind} has a lone surrogate"):
        _shared(tmp_path_factory).compile(GrammarSource(kind, "\ud800"))


def test_a_source_and_the_tools_may_each_have_their_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each refusal names the one that is too large, though both are compiled together."""

    def calls(size: int) -> CallRules:
        comment = "// " + "x" * size
        return CallRules(f'{comment}\ncalls: "c"\nanswer: TEXT', forced=False)

    grammars = _shared(tmp_path_factory)
    grammars.compile(YES, calls=calls(MAX_TEXT))
    with pytest.raises(UsageError, match=r"^the regex is too large"):
        grammars.compile(GrammarSource("regex", "y" * (MAX_TEXT + 1)), calls=calls(9))
    with pytest.raises(UsageError, match=r"^the grammar of the tools is too large") as caught:
        grammars.compile(YES, calls=calls(2 << 20))
    assert caught.value.hint == "offer fewer tools, or shorter schemas"


def test_a_compilation_without_end_is_ended(tmp_path: Path) -> None:
    grammars = _grammars(tmp_path)
    before = psutil.Process().children()
    with pytest.raises(UsageError, match="the schema is too complex: it takes more than 2 s or 2 GB to compile"):
        grammars.compile(GrammarSource("schema", schema_text(MULTIPLES)))
    assert psutil.Process().children() == before
    grammars.compile(GrammarSource("schema", schema_text({"type": "integer"})))


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31", "2023-00-10"]),
        ("time", ["23:59:59Z", "00:00:00.123+05:30"], ["23:58:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z"]),
    ],
)
def test_only_existing_dates_and_times_fit_their_formats(
    tmp_path_factory: pytest.TempPathFactory, name: str, valid: list[str], invalid: list[str]
) -> None:
    grammars = _shared(tmp_path_factory)
    for schema in ({"type": "string", "format": name}, {"format": name, "allOf": [{"minLength": 2}]}):
        grammar = grammars.compile(
            GrammarSource("schema", schema_text({"properties": {"a": schema}, "required": ["a"]}))
        )
        for text in (*valid, *invalid):
            tokens = grammars.trie(json.dumps({"a": text}, separators=(",", ":")))
            assert (grammar.start().allowed(tokens) == len(tokens)) == (text in valid)
    kept = {"const": {"format": name}, "properties": {"format": {"type": "string"}}, "additionalProperties": False}
    assert json.loads(schema_text(kept)) == kept
