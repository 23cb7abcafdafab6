"""Masks against a brute-force check: a token is allowed if the text with it begins a text of the language."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.models.text.structured.grammar_source import GrammarSource
from headrace.models.text.structured.grammars import Grammars, TokenTrie
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.sampling.constraint import Constraint
from tests.support.tiny_chat import write_byte_tokenizer
from tests.support.tokenizer_kinds import KINDS, write_kind

# A finite language in three ways of writing it, and all its texts.
_COLOURS = ("red", "green", "re")
_TEXTS = [
    f'{{"a":{a},"b":[{",".join(items)}]}}'
    for a in ("true", "false")
    for count in range(3)
    for items in itertools.product([f'"{colour}"' for colour in _COLOURS], repeat=count)
]
_SCHEMA = """{"type": "object", "properties": {"a": {"type": "boolean"},
    "b": {"type": "array", "items": {"enum": ["red", "green", "re"]}, "maxItems": 2}}, "required": ["a", "b"],
    "additionalProperties": false}"""
_REGEX = r'\{"a":(true|false),"b":\[("(red|green|re)"(,"(red|green|re)")?)?\]\}'
_LARK = """start: "{" "\\"a\\":" ("true" | "false") ",\\"b\\":[" (item ("," item)?)? "]}"
item: "\\"" ("red" | "green" | "re") "\\""
"""
SOURCES = [GrammarSource("schema", _SCHEMA), GrammarSource("regex", _REGEX), GrammarSource("grammar", _LARK)]


@pytest.fixture(scope="module", params=["bytes", "GPT-2"])
def grammars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Tokenizers of single bytes, and of 700 merged tokens; both with logits beyond the vocabulary."""
    directory = tmp_path_factory.mktemp("vocabulary")
    if request.param == "bytes":
        write_byte_tokenizer(directory)
    else:
        write_kind(directory, request.param, "special")
    tokenizer = Tokenizer.load(directory)
    return Grammars(tokenizer, tokenizer.vocab_size + 13)


def _allowed(constraint: Constraint) -> set[int]:
    return {index for index, allowed in enumerate(constraint.masks([]).tolist()[0]) if allowed}


def _expected(trie: TokenTrie, so_far: bytes, texts: Sequence[str]) -> set[int]:
    """The tokens that may follow by trying every token against every text of the language."""
    left = [text.encode() for text in texts if text.encode().startswith(so_far)]
    ends = set(trie.ends) if any(text == so_far for text in left) else set()
    return ends | {
        index
        for index, data in enumerate(trie.tokens)
        if data and index not in trie.marks and any(text.startswith(so_far + data) for text in left)
    }


@pytest.mark.sampled
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.kind)
def test_a_mask_allows_exactly_the_tokens_that_continue_a_valid_text(grammars: Grammars, source: GrammarSource) -> None:
    trie = grammars.trie
    chance = random.Random(3)
    ended = set()
    for _ in range(12):
        constraint = grammars.compile(source).start()
        so_far = b""
        while True:
            allowed = _allowed(constraint)
            expected = _expected(trie, so_far, _TEXTS)
            forced = list(constraint.forced())
            if allowed != expected:  # forced text has one token: the one that the tokenizer gives
                assert allowed == set(forced[:1])
                assert allowed < expected
            token = chance.choice(sorted(allowed))
            assert constraint.allowed([token]) == (token not in trie.ends)
            if token in trie.ends:
                break
            constraint.accept([token])
            so_far += trie.tokens[token]
        ended.add(so_far.decode())
    assert ended <= set(_TEXTS)
    assert len(ended) > 3


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.kind)
def test_masks_after_draft_tokens_are_those_of_the_steps(grammars: Grammars, source: GrammarSource) -> None:
    text = _TEXTS[-1]
    tokens = grammars.trie(text)
    for wrong in (None, 0, len(tokens) // 2, len(tokens) - 1):
        draft = [grammars.trie("~")[0] if place == wrong else token for place, token in enumerate(tokens)]
        constraint = grammars.compile(source).start()
        stepped = grammars.compile(source).start()
        masks = constraint.masks(draft).tolist()
        assert len(masks) == len(draft) + 1
        right = len(tokens) if wrong is None else wrong
        assert constraint.allowed(draft) == right
        for place in range(right + 1):
            assert masks[place] == stepped.masks([]).tolist()[0]
            if place < right:
                stepped.accept([tokens[place]])
        assert constraint.masks([]).tolist()[0] == masks[0]  # rolled back
        constraint.accept(tokens)
        assert _allowed(constraint) == set(grammars.trie.ends)
        assert list(constraint.forced()) == grammars.trie.ends[:1]


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars) -> None:
    for source in SOURCES:
        constraint = grammars.compile(source).start()
        with pytest.raises(EngineError):
            constraint.accept(grammars.trie("x"))


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    assert grammars.compile(SOURCES[0]) is grammars.compile(GrammarSource("schema", _SCHEMA))
    one = grammars.compile(SOURCES[0]).start()
    other = grammars.compile(SOURCES[0]).start()
    one.accept(grammars.trie("{"))
    assert one.masks([]).tolist() != other.masks([]).tolist()


def test_a_continued_answer_starts_in_its_grammar_state(grammars: Grammars) -> None:
    constraint = grammars.compile(SOURCES[0], begun=_TEXTS[-1][:9]).start()
    constraint.accept(grammars.trie(_TEXTS[-1][9:]))
    assert _allowed(constraint) == set(grammars.trie.ends)
    with pytest.raises(UsageError):
        grammars.compile(SOURCES[0], begun="Sure!")


@pytest.mark.parametrize("kind", [kind for kind, parts in KINDS.items() if parts[0] == "bytes"])
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path: Path, kind: str) -> None:
    _check_bytes(Tokenizer.load(write_kind(tmp_path, kind, "special")))


def _check_bytes(tokenizer: Tokenizer) -> None:
    trie = TokenTrie(tokenizer, tokenizer.vocab_size)
    chance = random.Random(5)
    text_tokens = [index for index, data in enumerate(trie.tokens) if data and index not in trie.marks]
    for _ in range(200):
        ids = chance.choices(text_tokens, k=6)
        stream = tokenizer.answer_stream()
        text = "".join([*map(stream.add, ids), stream.finish()])
        joined = b"".join(trie.tokens[index] for index in ids).decode(errors="replace")
        assert text == (joined.removeprefix(" ") if tokenizer.detokenizers.strips_first_space else joined)
    for text in ('{"name":"x y","é":[1,-2.5e3]}', "</s><|im_end|>", "漢字\n\n  {"):
        ids = trie(text)
        assert b"".join(trie.tokens[index] for index in ids) in (text.encode(), b"")
        assert trie.marks.isdisjoint(ids)
