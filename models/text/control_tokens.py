"""Protection against control tokens in user text; the template's own control tokens stay.

Only the chat template may write control tokens (`<|im_end|>`, `<s>`, `[INST]`). The tokenizers library encodes one text
and cannot tell template from user text. A rendered prompt knows the origin of each character (`template_text`), so the
template's control tokens are those without a character from outside. `shadow` is a second tokenizer in which control
tokens have secret names, and `secret` writes these names in the prompt. The shadow encodes the result in one pass, so
merges and spacing are unchanged.

Guards: tests/models/text/test_control_tokens.py and test_unmarked_controls.py.
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

TURN_ENDS = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool's answer
    "<end_of_turn>",  # Gemma 2 and 3
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi
    "<|endoftext|>",  # end of text: base models, and chats without their own token
    "<|end_of_text|>",  # the same in Llama 3
)
"""Control tokens that end a turn in known model families, whatever EOS a checkpoint declares.

They only count if the vocabulary has them as control tokens and the chat template, if any, writes them.
"""
_SECRET_NAMES = 0x100000  # supplementary private use area B, unused in ordinary text

# Added tokens not declared special count as control tokens if the template writes them and they look like markup
# (`<think>`, `<tool_call>`), unlike Gemma's added tokens for runs of blank lines.
# Tokens of single bytes (`<0x3C>` is "<") spell text.
_MARKUP = re.compile(r"(?!<0x[0-9A-F]{2}>)[<\[].+[>\]]", re.DOTALL)
_OWN_PARTS = re.compile(f"{OWN}+")  # of `TemplateText.origin`: runs of the template's own characters
# Markup within a text: `<|im_end|>`, `[INST]`.
_MARKUP_IN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class ControlTokens:
    """The control tokens of one vocabulary. Immutable and thread-safe."""

    def __init__(self, special: Mapping[str, int], markup: Mapping[str, int] | None = None) -> None:
        """Find these tokens in texts.

        special: text -> id of declared special tokens.
        markup: the same of other tokens that the template writes.

        Assistant messages may contain markup, since the model writes it as text (thinking, tool calls).
        """
        self._ids_of = {text: token_id for text, token_id in {**(markup or {}), **special}.items() if text}
        self.ids = frozenset(self._ids_of.values())
        self._markup = _Finder(markup or {})
        self._all = _Finder(self._ids_of)
        # See `shield`: for contents, which may have markup but no tags of thinking.
        self._not_markup = _Finder({*special, OPEN, CLOSE})
        self._shield = os.urandom(16).hex()  # plain letters and digits: a template may write them as ASCII
        # 128 random bits: no text contains a name by chance or by guessing.
        key = "".join(chr(_SECRET_NAMES + byte) for byte in os.urandom(16))
        numbers = [chr(_SECRET_NAMES + i // 4096) + chr(_SECRET_NAMES + i % 4096) for i in range(len(self._ids_of))]
        self._secret_of = {text: key + number for text, number in zip(self._ids_of, numbers, strict=True)}

    def mark_markup(self, text: str) -> str:
        """Return the text of an assistant's message, with its markup as the template's own."""
        parts: list[str] = []
        position = 0
        for start, end in self._markup.spans(text):
            parts += (text[position:start], TemplateText(text[start:end]))
            position = end
        return concatenate([*parts, text[position:]])

    def shield(self, text: str, *, markup: bool = False) -> str:
        """Return a text in which no template finds control tokens or tags of thinking, until `unshield`.

        Templates cut an answer at a tag, or refuse it. markup: no other markup either.
        """
        finder = self._all if markup else self._not_markup
        parts: list[str] = []
        position = 0
        for start, _ in finder.spans(text):
            parts.append(text[position : start + 1])
            position = start + 1
        return self._shield.join([*parts, text[position:]])

    def unshield(self, prompt: TemplateText) -> TemplateText:
        """Return a prompt with the texts that were shielded as they are."""
        return as_template_text(concatenate(prompt.split(self._shield)))

    def find(self, prompt: TemplateText) -> list[int]:
        """Return the ids of the template's control tokens, leftmost first, the longest at each position."""
        return [self._ids_of[prompt[start:end]] for start, end in self._written(prompt)]

    def has_look_alike(self, prompt: TemplateText) -> bool:
        """Return whether a control token is written with characters from outside."""
        return any(OUTSIDE in prompt.origin[start:end] for start, end in self._all.spans(prompt))

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
            yield from self._all.spans(prompt, part.start(), part.end())

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
        """Give the control tokens their secret names in a tokenizer.json's model."""
        names = self._secret_of
        vocab = model["vocab"]
        if isinstance(vocab, list):  # Unigram: [[piece, score], ...], the position is the id
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
            return
        # In the order in which the library reads them soonest, as in `models.gguf.tokenizer`.
        renamed = {names.get(piece, piece): index for piece, index in vocab.items()}
        model["vocab"] = {piece: renamed[piece] for piece in sorted(renamed)}
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


class _Finder:
    """Search for any of many texts. Gemma has 6,000; a regular expression of them compiles for 0.3 s."""

    def __init__(self, texts: Collection[str]) -> None:
        # A search for their first characters, then a look-up of each length from there, the longest first.
        self._texts = frozenset(filter(None, texts))
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(re.escape(character) for character in sorted({text[0] for text in self._texts}))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def spans(self, text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield start and end of each text in `text[start:end]`, leftmost first, the longest at each position."""
        plain = str.__str__(text)  # slices of a TemplateText have origins, which take time
        stop = len(plain) if end is None else end
        while (match := self._first.search(plain, start, stop)) is not None:
            start = match.start()
            ends = (start + length for length in self._lengths if start + length <= stop)
            last = next((last for last in ends if plain[start:last] in self._texts), None)
            if last is not None:
                yield start, last
            start = last or start + 1
