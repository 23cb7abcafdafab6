"""Protection against control tokens in user text; the template's own control tokens stay.

Only the chat template may write control tokens (`<|im_end|>`, `<s>`, `[INST]`). The tokenizers library encodes one text
and cannot tell template from user text. A rendered prompt knows the origin of each character (`template_text`), so the
template's control tokens are those without a character from outside. `shadow` is a second tokenizer in which control
tokens have secret names, and `secret` writes these names in the prompt. The shadow encodes the result in one pass, so
merges and spacing are unchanged.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.models.text.template_text import OUTSIDE, OWN, TemplateText, as_template_text, concatenate
from headrace.models.text.thinking import CLOSE, OPEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_SECRET_NAMES = 0x100000  # supplementary private use area B, unused in ordinary text

# Added tokens not declared special count as control tokens if the template writes them and they look like markup
# (`<think>`, `<tool_call>`), unlike Gemma's added tokens for runs of blank lines.
# Tokens of single bytes (`<0x3C>` is "<") spell text.
_MARKUP = re.compile(r"(?!<0x[0-9A-F]{2}>)[<\[].+[>\]]", re.DOTALL)
_OWN_PARTS = re.compile(f"{OWN}+")
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
        self._not_markup = _any_of({*special, OPEN, CLOSE})
        self._shield = os.urandom(16).hex()  # plain letters and digits: a template may write them as ASCII
        # 128 random bits: no text contains a name by chance or by guessing.
        key = "".join(chr(_SECRET_NAMES + byte) for byte in os.urandom(16))
        numbers = [chr(_SECRET_NAMES + i // 4096) + chr(_SECRET_NAMES + i % 4096) for i in range(len(self._ids_of))]
        self._secret_of = {text: key + number for text, number in zip(self._ids_of, numbers, strict=True)}

    def mark_markup(self, text: str) -> str:
        """Return the text of an assistant's message, with its markup as the template's own."""
        parts: list[str] = []
        position = 0
        for match in self._markup.finditer(text):
            parts += (text[position : match.start()], TemplateText(match[0]))
            position = match.end()
        return concatenate([*parts, text[position:]])

    def shield(self, text: str, *, markup: bool = False) -> str:
        """Return a text in which no template finds control tokens or tags of thinking, until `unshield`.

        Templates cut an answer at a tag, or refuse it. markup: no other markup either.
        """
        marks = self._all if markup else self._not_markup
        return marks.sub(lambda match: match[0][:1] + self._shield + match[0][1:], text)

    def unshield(self, prompt: TemplateText) -> TemplateText:
        """Return a prompt with the texts that were shielded as they are."""
        return as_template_text(concatenate(prompt.split(self._shield)))

    def find(self, prompt: TemplateText) -> list[int]:
        """Return the ids of the template's control tokens, leftmost first, the longest at each position."""
        return [self._ids_of[prompt[start:end]] for start, end in self._written(prompt)]

    def has_look_alike(self, prompt: TemplateText) -> bool:
        """Return whether a control token is written with characters from outside."""
        return any(OUTSIDE in prompt.origin[match.start() : match.end()] for match in self._all.finditer(prompt))

    def secret(self, prompt: TemplateText) -> str:
        """Return a prompt with the secret names of the template's control tokens, which the shadow encodes."""
        parts: list[str] = []
        position = 0
        for start, end in self._written(prompt):
            parts += (prompt[position:start], self._secret_of[prompt[start:end]])
            position = end
        return "".join([*parts, prompt[position:]])

    def _written(self, prompt: TemplateText) -> Iterator[tuple[int, int]]:
        """Yield the places of control tokens without a character from outside."""
        for part in _OWN_PARTS.finditer(prompt.origin):
            for match in self._all.finditer(prompt, part.start(), part.end()):
                yield match.span()

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
        names = self._secret_of
        vocab = model["vocab"]
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


def looks_like_markup(text: str) -> bool:
    """Return whether an added token that is not declared special may be a control token of the template."""
    return _MARKUP.fullmatch(text) is not None


def markup_in(text: str) -> set[str]:
    """Return the parts of a text that look like control tokens."""
    return set(_MARKUP_IN.findall(text))


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
