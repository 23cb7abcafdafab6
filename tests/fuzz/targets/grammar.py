"""Schemas, regular expressions and Lark grammars of a request, and answers of a model to tools."""

import json
import random
from pathlib import Path
from typing import Any

from headrace.models.text.structured.grammar_source import GrammarSource, schema_text
from headrace.models.text.structured.grammars import Grammars
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.form import MarkupTokens
from headrace.models.text.tools.stream import ToolStream
from headrace.models.text.tools.table import FORMS
from headrace.models.text.tools.use import ToolUse
from tests.fuzz.mutate import mutated_bytes, mutated_value
from tests.models.text.tools.test_forms import RECORDED, TOOLS
from tests.support.schemas import REAL
from tests.support.tiny_chat import write_byte_tokenizer

_REGEX = (r"(yes|no)[.!]{0,3}\d+", r"^[\w.]+@[a-z]{2,}(\.[a-z]+)*$", r"(?i)a(?:b|c)*?\x41\u{1F600}[^\n]")
_LARK = (
    'start: item ("," item)*\nitem: NAME "=" value | "(" start ")"\nvalue: /[0-9]+/ | STRING\nNAME: /[a-z]{1,9}/\n'
    'STRING: "\\"" /[^"]*/ "\\""\n%ignore /[ \\n]+/\n',
    'start: a %json {"type": "object"} "x"{2,5}\na[lazy]: /.*end/\n%llguidance {"no_forcing": true}\n',
    "start: <[5]> | TEXT <[7-9]>\nTEXT: /(.|\\n)*/ & ~/(?s:.*)ab(?s:.*)/\n",
)
_WORDS = (
    *(b"(" * 150, b"[", b"{1,999}", b"{999999999}", b"*" * 9, b"|" * 99, b"\\p{L}", b"(?=a)", b"\n", b"start: ", b"/"),
    *(b"%json {", b"~", b"&", b"@x", b"<[999999]>", b"[suffix=", b"[lazy]", b"\xff", b"\0", b'"' * 3, b"a: a a\n"),
)
_KEYWORDS = (
    *("type", "enum", "const", "properties", "items", "pattern", "format", "minLength", "maxLength", "minItems"),
    *("maxItems", "minimum", "multipleOf", "anyOf", "oneOf", "allOf", "$ref", "$defs", "required", "patternProperties"),
)


class Sources:
    """A grammar of any kind, compiled, and some steps of an answer."""

    def __init__(self, folder: Path) -> None:
        write_byte_tokenizer(folder)
        tokenizer = Tokenizer.load(folder)
        self._grammars = Grammars(tokenizer, tokenizer.vocab_size)
        _ = self._grammars.trie.built

    def make(self, chance: random.Random) -> tuple[str, Any, int]:
        kind = chance.choice(("schema", "schema", "regex", "grammar"))
        if kind != "schema":
            text = chance.choice(_REGEX if kind == "regex" else _LARK).encode()
            return kind, mutated_bytes(chance, text, words=_WORDS).decode(errors="replace"), chance.randrange(99)
        schema = mutated_value(chance, chance.choice(list(REAL.values())))
        if isinstance(schema, dict) and chance.random() < 0.5:
            schema[chance.choice(_KEYWORDS)] = mutated_value(chance, chance.choice(list(REAL.values())))
        return kind, schema, chance.randrange(99)

    def run(self, given: tuple[str, Any, int]) -> None:
        kind, value, seed = given
        text = value
        if kind == "schema":
            text = schema_text(value if isinstance(value, dict) else {"items": value})
        constraint = self._grammars.compile(GrammarSource(kind, text)).start()  # type: ignore[arg-type]
        chance = random.Random(seed)
        for _ in range(8):
            allowed = [index for index, is_allowed in enumerate(constraint.masks([]).tolist()[0]) if is_allowed]
            token = chance.choice(allowed)
            if token in self._grammars.trie.ends:
                return
            constraint.accept([token])
            constraint.forced()


class ToolText:
    """An answer with tool calls in any form, in pieces."""

    def __init__(self, folder: Path) -> None:
        pass

    def make(self, chance: random.Random) -> tuple[str, list[str]]:
        name = chance.choice(list(RECORDED))
        answer = chance.choice(RECORDED[name])[0].encode("utf-8", "surrogatepass")
        words = [text.encode() for text in ("<tool_call>", "</tool_call>", "{" * 5000, '"', "[TOOL_CALLS]", "<think>")]
        text = mutated_bytes(chance, answer, words=words).decode("utf-8", "replace")
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(5))
        return name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def run(self, given: tuple[str, list[str]]) -> None:
        name, pieces = given
        use = ToolUse(TOOLS.definitions)
        marks = MarkupTokens((), lambda _: None, frozenset())
        stream = ToolStream(FORMS[name][1](marks, use.tools, ""), marks)
        for piece in pieces:
            _check(stream.feed(piece))
        _check(stream.finish())


def _check(result: tuple[str, Any]) -> None:
    result[0].encode()  # no lone surrogate leaves
    for call in result[1]:
        assert isinstance(json.loads(call.arguments), dict)
