"""Keeps what people type from becoming control tokens, while the template's own control tokens stay.

A control token (`<|im_end|>`, `<s>`, `[INST]`) is written by the chat template only. The library that encodes sees
one text and cannot tell who wrote which part of it, so two rewrites make the difference visible:

- `mask` replaces, in everything that came from outside, the characters a control token begins or ends with by
  stand-ins from a private-use plane. Whatever the template then does with it (join, trim, replace), no control token
  can come out.
- `shadow` is a second tokenizer in which every control token goes by a secret name instead of its public text. In a
  masked and rendered prompt, `secret` gives the template's control tokens those names and everything else its own
  characters back; the shadow then encodes it in one pass, so merges and spacing are what they always are.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_STAND_INS = 0xF0000  # supplementary private use area A: no text has a reason to hold it
_SECRET_NAMES = 0x100000  # area B

# Added tokens that are not declared special count as control tokens if the template writes them and they look like
# markup (`<think>`, `<tool_call>`). Runs of blank lines, which Gemma adds as tokens too, do not.
_MARKUP = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_MARKUP_IN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class ControlTokens:
    """The control tokens of one vocabulary. Immutable; safe to share between threads."""

    def __init__(self, special: Mapping[str, int], markup: Mapping[str, int] | None = None) -> None:
        """`special`: text -> id of declared special tokens. `markup`: of other tokens that the template writes;
        an assistant message may hold those, since the model writes them as text (its thinking, its tool calls)."""
        self._ids_of = {text: token_id for text, token_id in {**(markup or {}), **special}.items() if text}
        self.ids = frozenset(self._ids_of.values())
        self._markup = _any_of(markup or {})
        self._all = _any_of(self._ids_of)
        self._edges = "".join(sorted({char for text in self._ids_of for char in _edges(text)}))
        # 128 random bits: no text can hold a name by chance or by guessing.
        key = "".join(chr(_SECRET_NAMES + byte) for byte in os.urandom(16))
        numbers = [chr(_SECRET_NAMES + i // 4096) + chr(_SECRET_NAMES + i % 4096) for i in range(len(self._ids_of))]
        self._secret_of = {text: key + number for text, number in zip(self._ids_of, numbers, strict=True)}

    def find(self, text: str) -> list[int]:
        """Ids of the control tokens written in a text, in order: leftmost first, the longest at each place."""
        return [self._ids_of[found] for found in self._all.findall(text)] if self._ids_of else []

    def mask(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> "Masked":
        """The same messages and tools with every possible edge of a control token replaced by a stand-in."""
        written = list(_strings([messages, tools]))
        used = set().union(*written)
        edges = [edge for edge in self._edges if edge in used]
        if not edges:
            return Masked(messages, tools, back={}, has_look_alike=False)
        free = (code for code in range(_STAND_INS, _STAND_INS + 0xFFFE) if chr(code) not in used)
        back = dict(zip(free, edges, strict=False))
        table = {ord(edge): chr(stand_in) for stand_in, edge in back.items()}
        masked_messages = [self._mask_message(message, table) for message in messages]
        masked_tools = _map_strings(tools, lambda text: text.translate(table))
        left = "".join(_strings([masked_messages, masked_tools]))
        has_look_alike = sum(len(self.find(text)) for text in written) != len(self.find(left))
        return Masked(masked_messages, masked_tools, back, has_look_alike)

    def secret(self, prompt: str, masked: "Masked") -> str:
        """A masked and rendered prompt as the shadow reads it."""
        named = self._all.sub(lambda found: self._secret_of[found[0]], prompt)
        return named.translate(masked.back)

    def shadow(self, tokenizer: "RustTokenizer") -> "RustTokenizer":
        """A copy of the tokenizer with the same ids, that knows control tokens by their secret names only."""
        from tokenizers import Tokenizer as RustTokenizer

        document = json.loads(tokenizer.to_str())
        added_tokens = {added["content"]: added for added in document["added_tokens"]}
        for text, secret in self._secret_of.items():
            plain = {"id": self._ids_of[text], "single_word": False, "lstrip": False, "rstrip": False, "special": True}
            added = added_tokens.setdefault(text, plain)  # what was a piece of the vocabulary only is one from now on
            added |= {"content": secret, "normalized": False}  # a normalizer may drop what no text has
        document["added_tokens"] = sorted(added_tokens.values(), key=lambda added: added["id"])
        document["post_processor"] = None  # adds tokens around a whole prompt, which is not wanted here
        self._rename_in_model(document["model"])
        return RustTokenizer.from_str(json.dumps(document))

    def _rename_in_model(self, model: dict[str, Any]) -> None:
        names, vocab = self._secret_of, model["vocab"]
        if isinstance(vocab, list):  # Unigram: [[piece, score], ...], the position is the id
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
            return
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocab.items()}
        if (unknown := model.get("unk_token")) is not None:
            model["unk_token"] = names.get(unknown, unknown)
        if "merges" in model:
            # A merge that reads or makes a control token would name a piece that is gone.
            model["merges"] = [
                (left, right) for left, right in model["merges"] if names.keys().isdisjoint((left, right, left + right))
            ]

    def _mask_message(self, message: Mapping[str, Any], table: dict[int, str]) -> dict[str, Any]:
        def outside_markup(text: str) -> str:
            kept = self._markup.findall(text)
            parts = [part.translate(table) for part in self._markup.split(text)]
            return parts[0] + "".join(token + part for token, part in zip(kept, parts[1:], strict=True))

        def plain(text: str) -> str:
            return text.translate(table)

        # Only the text of an assistant's message is its own, not the arguments of the tools it called.
        # The keys of a message belong to the chat format, those further in to whoever filled them.
        own = message.get("role") == "assistant"
        return {
            key: value
            if key == "role"
            else _map_strings(value, outside_markup if own and isinstance(value, str) else plain)
            for key, value in message.items()
        }


@dataclass(frozen=True)
class Masked:
    """Messages and tools without edges of control tokens, and the table that undoes it in the rendered prompt."""

    messages: Sequence[Mapping[str, Any]]
    tools: Any
    back: dict[int, str]  # for str.translate; empty when there was nothing to mask
    has_look_alike: bool  # whether anything but the template wrote a whole control token's text


def looks_like_markup(text: str) -> bool:
    """Whether an added token that is not declared special may be one of the template's control tokens."""
    return _MARKUP.fullmatch(text) is not None


def markup_in(text: str) -> set[str]:
    """What of a text looks like a control token."""
    return set(_MARKUP_IN.findall(text))


def _any_of(texts: Mapping[str, int]) -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _edges(text: str) -> tuple[str, str]:
    """First and last character that is not a letter or digit, so that words in messages stay readable to templates."""
    marks = [char for char in text if not char.isalnum() and not char.isspace()] or list(text)
    return marks[0], marks[-1]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
