"""Protection against control tokens in user text; the template's own control tokens stay.

Only the chat template may write control tokens (`<|im_end|>`, `<s>`, `[INST]`). The tokenizers library encodes one text
and cannot tell template from user text, so two rewrites separate them:

- `mask` replaces in all outside text the characters of control tokens by stand-ins from a private-use plane. The
  template may join, trim or replace such text: control tokens then consist of template text alone. For a template that
  looks for words, these words keep all characters but those that control tokens begin or end with.
- `shadow` is a second tokenizer in which control tokens have secret names. `secret` gives the template's control
  tokens in a masked, rendered prompt these names and restores all other characters. The shadow encodes the result in
  one pass, so merges and spacing are unchanged.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_STAND_INS = 0xF0000  # supplementary private use area A, unused in ordinary text
_SECRET_NAMES = 0x100000  # area B

# Added tokens not declared special count as control tokens if the template writes them and they look like markup
# (`<think>`, `<tool_call>`), unlike Gemma's added tokens for runs of blank lines.
_MARKUP = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_MOST_WORDS = 100  # that the template may find; they are searched in all outside text
_MARKUP_IN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class ControlTokens:
    """The control tokens of one vocabulary. Immutable and thread-safe."""

    def __init__(self, special: Mapping[str, int], markup: Mapping[str, int] | None = None) -> None:
        """special: text -> id of declared special tokens. markup: of other tokens that the template writes.

        Assistant messages may contain markup, since the model writes it as text (thinking, tool calls).
        """
        self._ids_of = {text: token_id for text, token_id in {**(markup or {}), **special}.items() if text}
        self.ids = frozenset(self._ids_of.values())
        self._markup = _any_of(markup or {})
        self._all = _any_of(self._ids_of)
        self._edges = "".join(sorted({char for text in self._ids_of for char in _edges(text)}))
        self._characters = "".join(sorted(set().union(*self._ids_of)))
        # 128 random bits: no text contains a name by chance or by guessing.
        key = "".join(chr(_SECRET_NAMES + byte) for byte in os.urandom(16))
        numbers = [chr(_SECRET_NAMES + i // 4096) + chr(_SECRET_NAMES + i % 4096) for i in range(len(self._ids_of))]
        self._secret_of = {text: key + number for text, number in zip(self._ids_of, numbers, strict=True)}

    def find(self, text: str) -> list[int]:
        """Return the ids of control tokens written in a text, leftmost first, the longest at each position."""
        return [self._ids_of[found] for found in self._all.findall(text)] if self._ids_of else []

    def mask(self, messages: Sequence[Mapping[str, Any]], tools: Any, words: Collection[str] = ()) -> "Masked":
        """Return messages and tools with stand-ins for the characters of control tokens.

        words: texts that the template looks for. In them, only possible edges are replaced.
        """
        written = list(_strings([messages, tools]))
        used = set().union(*written)
        replaced = [char for char in self._characters if char in used]
        if not replaced:
            return Masked(messages, tools, back={}, has_look_alike=False)
        free = (code for code in range(_STAND_INS, _STAND_INS + 0xFFFE) if chr(code) not in used)
        back = dict(zip(free, replaced, strict=False))
        table = {ord(char): chr(stand_in) for stand_in, char in back.items()}
        edges = {code: stand_in for code, stand_in in table.items() if chr(code) in self._edges}
        found = [word for word in words if not used.isdisjoint(word) and any(word in text for text in written)]
        kept = _any_of(found[:_MOST_WORDS])

        def masked(text: str) -> str:
            if not found:
                return text.translate(table)
            parts = zip(kept.split(text), [*kept.findall(text), ""], strict=True)
            return "".join(part.translate(table) + word.translate(edges) for part, word in parts)

        masked_messages = [self._mask_message(message, masked) for message in messages]
        masked_tools = _map_strings(tools, masked)
        left = "".join(_strings([masked_messages, masked_tools]))
        has_look_alike = sum(len(self.find(text)) for text in written) != len(self.find(left))
        return Masked(masked_messages, masked_tools, back, has_look_alike)

    def mixes(self, prompt: str, masked: "Masked") -> bool:
        """Return whether a masked and rendered prompt has a control token of template text and outside text."""
        for found in self._all.finditer(prompt.translate(masked.back)):
            outside = sum(ord(char) in masked.back for char in prompt[found.start() : found.end()])
            if 0 < outside < len(found[0]):
                return True
        return False

    def secret(self, prompt: str, masked: "Masked") -> str:
        """Return a masked and rendered prompt with the secret names that the shadow encodes."""
        named = self._all.sub(lambda found: self._secret_of[found[0]], prompt)
        return named.translate(masked.back)

    def shadow(self, tokenizer: "RustTokenizer") -> "RustTokenizer":
        """Return a copy of the tokenizer with the same ids that knows control tokens only by their secret names."""
        from tokenizers import Tokenizer as RustTokenizer

        document = json.loads(tokenizer.to_str())
        added_tokens = {added["content"]: added for added in document["added_tokens"]}
        for text, secret in self._secret_of.items():
            plain = {"id": self._ids_of[text], "single_word": False, "lstrip": False, "rstrip": False, "special": True}
            added = added_tokens.setdefault(text, plain)  # a vocabulary piece becomes an added token
            added |= {"content": secret, "normalized": False}  # a normalizer may drop unusual characters
        document["added_tokens"] = sorted(added_tokens.values(), key=lambda added: added["id"])
        document["post_processor"] = None  # it would add tokens around the prompt
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
            # A merge from or to a control token would name a removed piece.
            model["merges"] = [
                (left, right) for left, right in model["merges"] if names.keys().isdisjoint((left, right, left + right))
            ]

    def _mask_message(self, message: Mapping[str, Any], masked: Callable[[str], str]) -> dict[str, Any]:
        def outside_markup(text: str) -> str:
            kept = self._markup.findall(text)
            parts = [masked(part) for part in self._markup.split(text)]
            return parts[0] + "".join(token + part for token, part in zip(kept, parts[1:], strict=True))

        # Only the text of an assistant's message is its own, not the arguments of its tool calls. The keys of a
        # message belong to the chat format; nested keys are outside text.
        own = message.get("role") == "assistant"
        return {
            key: value
            if key == "role"
            else _map_strings(value, outside_markup if own and isinstance(value, str) else masked)
            for key, value in message.items()
        }


@dataclass(frozen=True)
class Masked:
    """Messages and tools with stand-ins, and the table to restore characters in the rendered prompt."""

    messages: Sequence[Mapping[str, Any]]
    tools: Any
    back: dict[int, str]  # for str.translate; empty if nothing was masked
    has_look_alike: bool  # whether outside text contains a whole control token's text


def looks_like_markup(text: str) -> bool:
    """Return whether an added token that is not declared special may be a control token of the template."""
    return _MARKUP.fullmatch(text) is not None


def markup_in(text: str) -> set[str]:
    """Return the parts of a text that look like control tokens."""
    return set(_MARKUP_IN.findall(text))


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _edges(text: str) -> tuple[str, str]:
    """Return the first and last character that is not alphanumeric, so that templates can still match words."""
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
    if isinstance(value, Mapping):  # templates read keys that are names
        return {
            key if isinstance(key, str) and key.isidentifier() else _map_strings(key, change): _map_strings(
                item, change
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
