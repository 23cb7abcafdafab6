"""A model's vocabulary as llguidance's token trie: the bytes of every token, and the tokens of forced text.

`Grammars` has one for each model. llguidance reads the attributes and calls the object: their names are its own.

Guard: tests/models/text/structured/test_masks.py.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from headrace.models.text.thinking import CLOSE, OPEN
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_ANCHOR = "\n"  # text before which a tokenizer puts its space, if it adds one
_CANNOT = "this model's answers cannot be constrained"


class TokenTrie:
    """The trie of one vocabulary. V = logits of the network.

    marks: ids of control tokens, which a grammar names by id (`<[7]>`); no text contains them.
    """

    is_tokenizer_wrapper = True  # read by llguidance, as are the lower-case attributes below
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises UsageError for a tokenizer without an end of turn, or tokens without bytes of their own."""
        tokens = tokenizer.detokenizers.token_bytes(vocab_size)
        if tokens is None:
            raise UsageError(f"{_CANNOT}: the text of a token depends on its neighbours")
        self.tokens = tokens
        self.ends = sorted(index for index in tokenizer.eos_ids if index < vocab_size)
        if not self.ends:
            raise UsageError(f"{_CANNOT}: the tokenizer has no end-of-turn token")
        self.eos_token_id = self.ends[0]
        # Control tokens: ends, special tokens, and those of thinking.
        marks = {*self.ends, *tokenizer.detokenizers.special, tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)}
        if tokenizer.thinking_form is not None:
            marks |= set(tokenizer.thinking_form.ids)
        self.marks = frozenset(index for index in marks if index is not None and index < vocab_size)
        self.special_token_ids = sorted(self.marks)
        self._tokenizer = tokenizer

    @cached_property
    def built(self) -> "LLTokenizer":
        """llguidance's tokenizer. Building it takes about a second for 150,000 tokens."""
        from llguidance import LLTokenizer

        return LLTokenizer(self, eos_token=self.ends)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text within an answer, as the model would split it; their bytes are the text's.

        No control token is among them, also where the text is written like one: it could end the model's turn.
        """
        wanted = text.encode()
        for anchor in ("", _ANCHOR):  # after an anchor: a space that the tokenizer adds is cut off with it
            ids = self._tokenizer.encode_here(anchor + text)
            for start in range(min(3, len(ids))):  # the anchor, and a space before it, are two tokens at most
                tokens = ids[start:]
                if all(map(self._is_text, tokens)) and b"".join(self.tokens[index] for index in tokens) == wanted:
                    return tokens
        return self._longest_first(wanted)

    def _longest_first(self, data: bytes) -> list[int]:
        """Return the longest token at each position: for text that looks like control tokens."""
        ids = []
        at = 0
        while at < len(data):
            pieces = (data[at : at + size] for size in range(min(self._longest, len(data) - at), 0, -1))
            longest = next((piece for piece in pieces if piece in self._id_of), None)
            if longest is None:
                return []  # a byte without a token: nothing is forced
            ids.append(self._id_of[longest])
            at += len(longest)
        return ids

    def _is_text(self, index: int) -> bool:
        """Return whether a token has text, and is no control token."""
        return index < len(self.tokens) and index not in self.marks

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        """Ids of tokens with text, by their bytes."""
        return {data: index for index, data in enumerate(self.tokens) if data and index not in self.marks}

    @cached_property
    def _longest(self) -> int:
        """The most bytes of a token with text."""
        return max(map(len, self._id_of), default=0)
