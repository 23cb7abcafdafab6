"""Calls of the `tokenizers` library that can be ended, within limits of time and memory.

A tokenizer.json has regular expressions and vocabularies that can take hours for one line of text, and nothing can
interrupt the library. `limited` runs a call on a thread of its own and waits for it: Ctrl-C, signals and a cancelled
answer end the wait. A thread without a waiter ends with the process; until then no other call is started.

Guard: tests/models/text/test_encoding.py.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from unicodedata import normalize

from headrace.models.text.tokenizers_library import MAX_UTF8, library_errors, panics_hidden, parts_of, text_growth
from headrace.runtime.errors import CheckpointError, ContextLimitError, HeadraceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

T = TypeVar("T")

MAX_TEXT = 8_000_000  # characters of a prompt
_LONGEST_S = 1.5  # that any call may take
_PER_CHARACTER_S = 20e-6  # and per character: tokenizers in common use take 0.2e-6 to 2e-6
_LOOK_S = 0.05  # between looks at the limit
_MOST_COMPOSED = 4  # characters that become one in the composed form of Unicode (NFC)
_MOST_NORMALIZED = 2 * MAX_TEXT  # characters that the library may make of a text, about 160 bytes each
_FORMS: tuple[Literal["NFD", "NFC", "NFKD", "NFKC"], ...] = (
    "NFD",
    "NFC",
    "NFKD",
    "NFKC",
)  # Unicode's forms of a text, as normalizers are named
_MOST_IN_FORM = 18  # characters that one becomes in any form of Unicode
# Characters of a text that are measured at a time: Python holds its lock while it sorts accents, in quadratic time.
_PIECE = 1 << 6

# Calls without a waiter. At most one uses a processor: callers of `limited` hold the lock of `panics_hidden`, and the
# next call waits for those in this list.
_unfinished: list[Thread] = []


class EncodingStoppedError(HeadraceError):
    """A call that `encoding_ends` ended."""


def _never() -> bool:
    """Return False: outside of `encoding_ends`, nothing ends a call."""
    return False


# The arguments of `encoding_ends`.
_stop: ContextVar[Callable[[], bool]] = ContextVar("stop", default=_never)
_most_tokens: ContextVar[int | None] = ContextVar("most_tokens", default=None)


@contextmanager
def encoding_ends(stop: Callable[[], bool], most_tokens: int | None = None) -> Iterator[None]:
    """End calls within this block with EncodingStoppedError when `stop()` is true.

    most_tokens: refuse a text that certainly has more, with ContextLimitError, before it is encoded.
    """
    earlier_stop = _stop.set(stop)
    earlier_most = _most_tokens.set(most_tokens)
    try:
        yield
    finally:
        _stop.reset(earlier_stop)
        _most_tokens.reset(earlier_most)


def is_stopped() -> bool:
    """Return whether the caller's `encoding_ends` asks to end."""
    return _stop.get()()


def limited(call: Callable[[], T], characters: int) -> T:
    """Return the result of a call for a text of so many characters. Raises CheckpointError beyond the time limit."""
    # One call at a time: first those without a waiter.
    deadline = _Deadline(characters)
    for earlier in tuple(_unfinished):
        _wait(earlier, deadline)
        with suppress(ValueError):  # another thread waited, too
            _unfinished.remove(earlier)
    thread = _ThreadedCall(call)
    thread.start()
    try:
        _wait(thread, deadline)
    except BaseException:  # an interrupt, or the end of time: the thread still runs
        _unfinished.append(thread)
        raise
    if thread.error is not None:
        raise thread.error
    return thread.result


class _ThreadedCall(Thread, Generic[T]):
    """A call in a daemon thread, and its result or error."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(name="tokenizer", daemon=True)
        self._call = call
        self.result: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # panics of the library are no Exceptions
            self.error = error


class _Deadline:
    """The time limit of a call, over once both clocks have passed it.

    Other programs take wall time, and other threads of this process, such as an engine's, take processor time.
    """

    def __init__(self, characters: int) -> None:
        self.characters = characters
        seconds = _LONGEST_S + _PER_CHARACTER_S * characters
        self._processor = time.process_time() + seconds
        self._wall = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """True after the limit."""
        return time.process_time() > self._processor and time.monotonic() > self._wall


def _wait(thread: Thread, deadline: _Deadline) -> None:
    """Wait for a call. Raises EncodingStoppedError if it is to end, CheckpointError if it takes too long."""
    while True:
        thread.join(_LOOK_S)
        if not thread.is_alive():
            return
        if is_stopped():
            raise EncodingStoppedError("the tokenizer was stopped")
        if deadline.is_over:
            raise CheckpointError(
                f"the tokenizer failed: it takes too long for {deadline.characters} characters", "use another model"
            )


class Encoder:
    """A tokenizer's conversion of text to ids."""

    def __init__(self, rust: "RustTokenizer") -> None:
        """Raises CheckpointError for a tokenizer that makes texts far longer."""
        self.rust = rust
        with library_errors("the tokenizer cannot be used"):
            normalizer = _state(rust.normalizer)
            pre_tokenizer = _state(rust.pre_tokenizer)
            growth = text_growth(normalizer, pre_tokenizer)
            kinds = {part.get("type") for part in parts_of(normalizer)} - {"Sequence", None}
            self._forms = [form for form in _FORMS if form in kinds]
            # A byte-level tokenizer makes a character of every byte. The bytes of a text are counted if no other step
            # changes them before, as most texts have far fewer than four for each character.
            is_byte_level = any(part.get("type") == "ByteLevel" for part in parts_of(pre_tokenizer))
            self._counts_bytes = is_byte_level and kinds <= set(_FORMS)
            if self._counts_bytes:
                growth /= MAX_UTF8
            self._longest = int(_MOST_NORMALIZED / growth)  # characters or bytes that may become _MOST_NORMALIZED
            text_growth(decoder := _state(rust.decoder))
            if any("Regex" in part for part in parts_of(decoder)):
                raise ValueError("its decoder searches with a regular expression")

    def fewest_tokens(self, characters: int) -> int:
        """Return a number of tokens that any text of so many characters has at least; 0 if no such number is known."""
        if self._longest_token:
            return -(-characters // self._longest_token)
        return 0

    @cached_property
    def _longest_token(self) -> int:
        """The most characters of a text that become one token; 0 if not known.

        Known of byte-level tokenizers, which take every byte of a text once. Others skip, join or shorten.
        """
        splits = list(parts_of(_state(self.rust.pre_tokenizer)))
        normalizers = {part.get("type") for part in parts_of(_state(self.rust.normalizer))} - {"Sequence", None}
        takes_bytes = any(part.get("type") == "ByteLevel" for part in splits)
        removes = any(part.get("behavior") == "Removed" for part in splits)
        strips = any(token.lstrip or token.rstrip for token in self.rust.get_added_tokens_decoder().values())
        if not takes_bytes or removes or strips or normalizers - {"NFC"}:
            return 0
        longest = max(map(len, self.rust.get_vocab()))  # a character of a token is a byte
        return longest * (_MOST_COMPOSED if normalizers else 1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, nothing added. Raises ContextLimitError for a text that takes too much memory."""
        max_tokens = _most_tokens.get()
        if max_tokens is not None and len(text) > max_tokens:
            fewest = self.fewest_tokens(len(text))
            if fewest > max_tokens:
                raise ContextLimitError(f"the prompt has at least {fewest} tokens, the context limit is {max_tokens}")
        with panics_hidden():  # in this thread, which may give up the call
            return limited(lambda: self.encode_here(text), len(text))

    def _size(self, text: str) -> int:
        """Return the number of characters of a text, or of bytes, in the form of Unicode in which it has the most.

        Few characters grow in a form, so a text is measured: the limit of all would be that of the worst one. A text
        that is short enough in any form is not measured, its characters are returned.
        """
        if len(text) * _MOST_IN_FORM * MAX_UTF8 <= self._longest:
            return len(text)
        if not self._forms:
            return self._measured(text)
        starts = range(0, len(text), _PIECE)
        return max(
            sum(self._measured(normalize(form, text[start : start + _PIECE])) for start in starts)
            for form in self._forms
        )

    def _measured(self, text: str) -> int:
        """Return the number of bytes or characters of a text."""
        if self._counts_bytes and not text.isascii():
            return len(text.encode(errors="replace"))
        return len(text)

    def encode_here(self, text: str) -> list[int]:
        """Encode on this thread."""
        size = self._size(text)
        if size > self._longest:
            raise ContextLimitError(
                f"the prompt is too long: {len(text)} characters count as {size}, this tokenizer takes {self._longest}"
            )
        with library_errors("the tokenizer failed"):
            # Other threads run during a batch, and wait for the call of one text.
            ids: list[int] = self.rust.encode_batch([text], add_special_tokens=False)[0].ids
        return ids


def _state(part: Any) -> Mapping[str, object]:
    """Return a normalizer, pre-tokenizer or decoder as in tokenizer.json."""
    state: Mapping[str, object] = {}
    if part is not None:
        state = json.loads(part.__getstate__())
    return state
