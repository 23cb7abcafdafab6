"""Safe access to the Rust `tokenizers` library: one kind of error, and no file that can end the process.

The library panics or aborts on malformed files, at load or at the first text or token that meets the malformed part; a
panic reaches Python as a BaseException. `load_tokenizer` refuses files known to cause this, and every call that reads
foreign data runs inside `library_errors`. docs/workarounds.md has the upstream reference.

Guard: tests/models/text/test_tokenizers_library.py has files at which the library would panic or abort.
"""

import base64
import binascii
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.models.checkpoint.side_file import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_PARTS,
    check_parts,
    read_side_file,
)
from headrace.runtime.config.environment import debug
from headrace.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LARGE_ID = re.compile(rb":\s*\d{8}")  # in a vocabulary: an id that may be out of range
# Characters of all patterns together: the library takes 16 KB for each class such as \p{L}. Models in use have 2,000.
_MOST_PATTERN = 1 << 15
MAX_UTF8 = 4  # bytes of a character
_MOST_GROWTH = 64  # growth of a text by all replacements; 36 in models in common use
_MOST_PREPENDED = 1 << 10  # bytes prepended to every text
_LARGEST_PART = 1 << 20  # parts of a normalizer, a pre-tokenizer or a decoder
_MOST_ADDED_BYTES = 1 << 20  # of all added tokens, from which the library builds a search table
_MOST_ADDED = 1 << 17  # added tokens, which take 20 to 30 µs each; models of speech have 65,536
# A panic's message on stderr: `thread '<unnamed>' panicked at src/file.rs:1:2: ...`, to the end.
_PANIC = re.compile(rb"(?:^|(?<=\n))\n?thread '[^\n]* panicked at .*", re.DOTALL)
_stderr_lock = threading.Lock()
# The most characters that normalizers and pre-tokenizers of a kind make of one. Unicode's forms of a text, such as NFC,
# are not here: `models.text.encoding` measures the text.
_GROWTHS = {
    "BertNormalizer": 3.0,  # spaces on both sides of a Chinese character
    "ByteLevel": float(MAX_UTF8),  # a character for each byte
    "Lowercase": 2.0,  # the Turkish capital I with a dot becomes two
}
LARGEST_ID = 1 << 24  # the library allocates all ids up to the largest


class PanicError(CheckpointError):
    """A panic of the library: the tokenizer is broken or hostile, whatever the text."""


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Convert errors and panics of the library to a CheckpointError that begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{what}: {_first_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which no module exports
            raise
        raise PanicError(f"{what}: {_first_line(error)}") from None


@contextmanager
def panics_hidden() -> Iterator[None]:
    """Keep the lines that the library writes in a panic from stderr. Other lines of this block follow after it."""
    with _stderr_lock, ExitStack() as stack:
        try:
            if debug():
                raise OSError
            saved = os.dup(2)
            stack.callback(os.close, saved)
            caught = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # no stderr, or no temporary files
            yield
            return
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            caught.seek(0)
            with suppress(OSError):
                os.write(2, _PANIC.sub(b"", caught.read()))


def load_tokenizer(file: Path) -> "Tokenizer":
    """Load a tokenizer.json. Raises CheckpointError for one that is unreadable or unsafe to use."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a pool of threads, and warnings after a fork
    from tokenizers import Tokenizer

    with library_errors(f"{file.name} cannot be read"):
        content = read_side_file(file, MAX_TOKENIZER_BYTES)
        check_parts(content, MAX_TOKENIZER_PARTS)
        _check_keys(content)
        _check(msgspec.json.decode(content, type=_Document))
        with panics_hidden():
            return Tokenizer.from_buffer(content)


def keep_byte_names(tokenizer: "Tokenizer") -> None:
    """Change a unigram tokenizer to read the name of a byte token in a text, such as <0x41>, as text.

    SentencePiece makes byte tokens of characters that its vocabulary lacks. The library looks up the names in every
    text, too. Text is cut after the < of such a name, so that no token of a whole one matches. Nor does a piece across
    the cut, such as <0, which SentencePiece would find there.
    """
    from tokenizers import Regex, models, pre_tokenizers

    if not isinstance(tokenizer.model, models.Unigram):  # merges make no byte tokens
        return
    if all(tokenizer.token_to_id(f"<0x{byte:02X}>") is None for byte in range(256)):
        return
    cut = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), behavior="merged_with_previous")
    earlier = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = cut if earlier is None else pre_tokenizers.Sequence([earlier, cut])


class _Model(msgspec.Struct):
    """The model of a tokenizer.json. The vocabulary and the merges, which take long to parse, stay text."""

    type: str | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"null")


class _Document(msgspec.Struct):
    """The parts of a tokenizer.json that can be unsafe."""

    model: _Model
    added_tokens: list[Any] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


class _Key:
    """A key of a JSON object. Each is another one, so that none takes the place of an equal one in a dict."""

    def __init__(self, text: str) -> None:
        self.text = text


def _check_keys(content: bytes) -> None:
    """Raise ValueError for a repeated key of a tokenizer.json or of its model.

    The library builds the document's part at each of the keys, and only the last one would be checked. In all other
    objects, it takes the last one or fails.
    """

    def values_of(data: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
        pairs = msgspec.json.decode(data, type=dict[_Key, msgspec.Raw], dec_hook=lambda _, text: _Key(text))
        values = {key.text: value for key, value in pairs.items()}
        if len(values) < len(pairs):
            raise ValueError("a key is repeated")
        return values

    if model := values_of(content).get("model"):
        values_of(model)


def _check(document: _Document) -> None:
    """Raise ValueError, or msgspec's error for another type, for every part that can panic later or abort.

    The library refuses other broken parts itself.
    """
    pattern_size = 0
    for step in (document.normalizer, document.pre_tokenizer, document.decoder):
        for part in parts_of(step):
            _check_part(part)
            pattern_size += len(str(part.get("Regex", "")))
    if pattern_size > _MOST_PATTERN:
        raise ValueError(f"its regular expressions have more than {_MOST_PATTERN} characters")

    added = [token for token in document.added_tokens or () if isinstance(token, Mapping)]
    check_added(str(token.get("content")) for token in added)
    ids = [token.get("id") for token in added]
    model = document.model
    kind = model.type
    if kind is None and model.unk_token is not None and bytes(model.merges) == b"null":
        kind = "WordLevel"  # so the library takes a model with neither a type nor merges; or for WordPiece
    needs_unknown = kind in ("WordPiece", "WordLevel")
    if needs_unknown or _LARGE_ID.search(model.vocab):
        vocab = msgspec.json.decode(model.vocab)
        if not isinstance(vocab, Mapping):  # a unigram model's is a list, without ids
            vocab = {}
        if needs_unknown and model.unk_token not in vocab:
            raise ValueError(f"the {kind} model has no unknown token in its vocabulary")
        ids += vocab.values()
    if any(isinstance(index, int) and index >= LARGEST_ID for index in ids):
        raise ValueError("a token has an id out of range")
    if prefix := model.continuing_subword_prefix:
        merges = msgspec.json.decode(model.merges, type=list[str | tuple[str, str]] | None)
        _check_merges(merges or [], len(prefix.encode()))


def check_added(texts: Iterable[str]) -> None:
    """Raise ValueError for too many added tokens, or too many bytes of them."""
    sizes = [len(text.encode()) for text in texts]
    if len(sizes) > _MOST_ADDED:
        raise ValueError(f"it has more than {_MOST_ADDED} added tokens")
    if sum(sizes) > _MOST_ADDED_BYTES:
        raise ValueError(f"its added tokens have more than {_MOST_ADDED_BYTES} bytes")


def parts_of(part: object) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer, pre-tokenizer or decoder and all its nested parts."""
    waiting = [part]
    seen = 0
    while waiting:
        part = waiting.pop()
        seen += 1
        if seen > _LARGEST_PART:
            raise ValueError("it has too many parts")
        if isinstance(part, Mapping):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _check_part(part: Mapping[str, Any]) -> None:
    """Raise ValueError for a part of which the library would panic later."""
    kind = part.get("type")
    charsmap = part.get("precompiled_charsmap")
    if charsmap is not None:
        try:
            data = base64.b64decode(charsmap, validate=True)
        except (TypeError, binascii.Error):
            raise ValueError("the character map is not base64") from None
        check_charsmap(data)
    if kind == "FixedLength" and part.get("length") == 0:
        raise ValueError("it cuts texts into pieces of length 0")
    if kind == "Strip" and part.get("stop"):  # a decoder with it panics at a shorter token
        raise ValueError("it strips the ends of tokens")


def text_growth(*steps: object) -> float:
    """Return the most characters that all steps together make of one. Raises ValueError for too many."""
    growth = 1.0
    prepended = 0
    for part in (part for step in steps for part in parts_of(step)):
        if part.get("type") == "Prepend":
            prepended += len(part["prepend"].encode())
        growth *= _growth(part)
    if prepended > _MOST_PREPENDED:
        raise ValueError(f"it puts more than {_MOST_PREPENDED} bytes before every text")
    if growth > _MOST_GROWTH:
        raise ValueError(f"it makes texts more than {_MOST_GROWTH} times as long")
    return growth


def _growth(part: Mapping[str, Any]) -> float:
    """Return the most characters that one part makes of one."""
    if part.get("type") == "Replace":
        replaced = part["pattern"].get("String")
        content = part["content"]
        if not replaced:  # a regular expression, or no text, which stands between all characters
            return 1.0 + len(content)
        return max(1.0, len(content) / len(replaced))
    if charsmap := part.get("precompiled_charsmap"):
        data = base64.b64decode(charsmap)
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(1.0, *(float(len(text.decode(errors="replace"))) for text in texts))
    return _GROWTHS.get(str(part.get("type")), 1.0)


def _check_merges(merges: list[str | tuple[str, str]], prefix: int) -> None:
    """Check merges: the library drops `prefix` bytes of each right side, and aborts inside a character."""
    for merge in merges:
        if isinstance(merge, str):
            _, _, text = merge.partition(" ")
        else:
            text = merge[1]
        right = text.encode()
        if len(right) < prefix or not _begins_character(right, prefix):
            raise ValueError("a merge lacks the prefix of continued words")


def check_charsmap(data: bytes) -> None:
    """Check a double-array trie (darts-clone) and the texts that its values point into, for out-of-range links.

    The library follows links without a bounds check. Raises ValueError.

    The map is the trie's size in bytes, its units of 32 bits, and texts that end in zero bytes. The unit's place, the
    number in its bits 10 to 31 (256 times that if bit 9 is set) and a byte give, by exclusive or, the place of the
    child for this byte; the child has the byte in its low 8 bits. Bit 8 says that the unit has a value: the place of a
    text, in the child for the byte 0.
    """
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or not size or size % 4 or 4 + size > len(data):
        raise ValueError("the character map is cut off")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = np.frombuffer(data, np.uint8, offset=4 + size)
    texts.tobytes().decode()
    begins = np.append(texts & 0xC0 != 0x80, True)  # valid targets of values: first bytes of characters, and the end
    bases = (units >> 10) << ((units & 0x200) >> 6)
    labels = units & 0x800000FF  # with bit 31, which only values have: they are no child
    seen = np.zeros(len(units), bool)
    nodes = np.array([0])
    # The trie level by level: in each round, all nodes that are as far from the root.
    while len(nodes):
        seen[nodes] = True
        targets = (nodes ^ bases[nodes])[:, None] ^ np.arange(256)  # (nodes, 256): target of each byte, 0 is the value
        if targets.max() >= len(units):
            raise ValueError("the character map points outside of itself")
        values = units[targets[:, 0]][(units[nodes] >> 8) & 1 == 1] & 0x7FFFFFFF
        if len(values) and (values.max() >= len(begins) or not begins[values].all()):
            raise ValueError("the character map points outside of its texts")
        next_nodes = targets[:, 1:][labels[targets[:, 1:]] == np.arange(1, 256)]
        nodes = np.unique(next_nodes[~seen[next_nodes]])


def _begins_character(data: bytes, at: int) -> bool:
    """Return whether a character of UTF-8 begins at a position, or the text ends there."""
    return at == len(data) or data[at] & 0xC0 != 0x80


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
