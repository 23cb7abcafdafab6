"""Tokenizers that take the longest token at each place of a text: the vocabulary of RWKV's "World" models.

Tokens are byte strings, all bytes among them. A regular expression finds them: a tree of their texts, in which longer
tokens are tried before shorter ones. Each text that it finds is a token, so nothing is merged.

`models.text.other_formats` reads a checkpoint's file with `read_world`, `models.gguf.tokenizer` makes the rules of a
GGUF's vocabulary with `longest_match`.

Guard: tests/models/text/test_other_formats.py.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headrace.models.checkpoint.side_file import read_side_file
from headrace.models.text.detokenizer import byte_alphabet, spelled
from headrace.models.text.tokenizers_library import check_added, library_errors
from headrace.runtime.errors import CheckpointError

_LONGEST = 256  # bytes of a token, 128 in use: groups of the expression may be nested as deep
_LARGEST = 16 << 20  # bytes of a file; the one in use has 1 MB
_MOST_TOKENS = 1 << 17  # of a vocabulary, and the largest id; 65,529 in use
# "257 '\t\n' 2" or "5 b'\x80' 1": an id, a literal of Python, its length in bytes
_LINE = re.compile(r"""(\d{1,7}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) (\d{1,4})""")
_END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"  # of id 0, which no file lists
_MEANS_MORE = frozenset(r"\^$.|?*+()[]{}-&")  # characters of an expression that do not stand for themselves


def read_world(file: Path, added: Mapping[int, Mapping[str, object]]) -> Tokenizer:
    """Return the tokenizer of a file rwkv_vocab_*.txt. Raises CheckpointError for a broken one.

    added: tokens outside the file by id, from tokenizer_config.json.
    """
    try:
        lines = [line for line in read_side_file(file, _LARGEST).decode().split("\n") if line]
    except ValueError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from None
    if len(lines) > _MOST_TOKENS:
        raise CheckpointError(f"{file.name}: more than {_MOST_TOKENS} tokens")
    ids: dict[bytes, int] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{file.name}: {line!r:.40} is no token")
        ids[_token(match[2], int(match[3]), file)] = int(match[1])
    used = set(ids.values())
    if len(ids) != len(lines) or len(used) != len(ids) or max(used, default=0) > _MOST_TOKENS:
        raise CheckpointError(f"{file.name}: two tokens have the same text or number, or a number is out of range")

    # Id 0 and ids after the file's are control tokens.
    controls = {index: str(entry.get("content")) for index, entry in added.items() if index not in used}
    controls.setdefault(0, _END_OF_TEXT)
    with library_errors(f"{file.name} cannot be used"):
        check_added(controls.values())
    vocabulary = {spelled(token): index for token, index in ids.items()}
    vocabulary |= {text: index for index, text in controls.items() if 0 <= index <= _MOST_TOKENS}
    if 0 in used or len(vocabulary) != len(ids) + len(controls):
        raise CheckpointError(f"{file.name}: a control token has the text or the number of another token")
    tokenizer = longest_match([spelled(token) for token in ids], vocabulary)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in controls.values()])
    return tokenizer


def _token(literal: str, size: int, file: Path) -> bytes:
    """Return the bytes of a literal. Raises CheckpointError for another number of them."""
    try:
        value = ast.literal_eval(literal)
        token: bytes = value.encode() if isinstance(value, str) else value
    except (ValueError, SyntaxError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{file.name}: {literal!r:.40} is no text") from error
    if len(token) != size:
        raise CheckpointError(f"{file.name}: {literal!r:.40} has {len(token)} bytes, not {size}")
    return token


def longest_match(texts: Iterable[str], vocabulary: Mapping[str, int] | None = None) -> Tokenizer:
    """Return the rules without added tokens.

    texts: tokens that plain text may contain, spelled in the alphabet of byte-level tokens. Raises CheckpointError
    without a token for each byte, for a very long one, and for very many.
    vocabulary: ids of all tokens; None to add them later.
    """
    texts = set(texts)
    if len(texts) > _MOST_TOKENS:
        raise CheckpointError(f"the vocabulary has more than {_MOST_TOKENS} tokens")
    if not texts.issuperset(byte_alphabet()):
        raise CheckpointError("some bytes are no tokens of the vocabulary")
    longest = max(map(len, texts))
    if longest > _LONGEST:
        raise CheckpointError(f"a token of the vocabulary has {longest} bytes")
    tokenizer = Tokenizer(BPE(vocab=dict(vocabulary or {}), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(_pattern(texts)), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_Tree = dict[str, "_Tree"]
"""Continuations of a text by their next character; "" where a token ends."""


def _pattern(texts: Iterable[str]) -> str:
    """Return the expression that matches the longest of some texts."""
    root: _Tree = {}
    for text in texts:
        tree = root
        for char in text:
            tree = tree.setdefault(char, {})
        tree[""] = {}
    return _branches(root)


def _branches(tree: _Tree) -> str:
    """Return the expression of what may follow: a group, optional where a token ends.

    A group is tried before nothing, and texts of one tree begin with different characters, so the longest token wins.
    """
    branches = []
    last = []  # characters after which nothing follows
    for char, after in tree.items():
        if not char:
            continue
        literal = f"\\{char}" if char in _MEANS_MORE else char
        if after.keys() == {""}:
            last.append(literal)
        else:
            branches.append(literal + _branches(after))
    if len(last) > 1:
        branches.append(f"[{''.join(last)}]")
    else:
        branches += last
    if not branches:
        return ""
    if "" in tree:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
