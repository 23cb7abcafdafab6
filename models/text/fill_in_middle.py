"""Prompts for the text in a gap, with the fill-in-the-middle tokens of code models.

Sources of the orders: the model cards of StarCoder, Qwen2.5-Coder, CodeGemma and DeepSeek-Coder (prefix, suffix,
middle) and of Codestral (suffix, prefix).

Guard: tests/models/text/test_fill_in_middle.py.
"""

import re
from typing import TYPE_CHECKING

from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.models.text.tokenizer import Tokenizer

# Tokens before the prefix, before the suffix, and after it.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# Tokens before the suffix, and before the prefix after it.
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
_BESIDE = (  # around the files of a repository
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<repo_name>", "<file_sep>", "<reponame>",
    "<filename>", "<|file_separator|>",
)  # fmt: skip


def fill_in_middle(tokenizer: "Tokenizer", prefix: str, suffix: str) -> list[int]:
    """Return the prompt whose continuation is the text between both. Raises UsageError for a model without such tokens.

    Raises what `Tokenizer.encode_prompt` raises.
    """
    vocabulary = {text: token for token, text in tokenizer.vocabulary().items()}
    start = tokenizer.encode_prompt("")
    before = tokenizer.encode(prefix)
    after = tokenizer.encode(suffix)
    for form in _FORMS:
        if all(text in vocabulary for text in form):
            opening, gap, end = (vocabulary[text] for text in form)
            return [*start, opening, *before, gap, *after, end]
    if all(text in vocabulary for text in _SUFFIX_FIRST):
        first, second = (vocabulary[text] for text in _SUFFIX_FIRST)
        return [*start, first, *after, second, *before]
    raise UsageError("suffix: the model has no fill-in-the-middle tokens", "leave it out, or use a code model")


def continued_text(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the prompt of a text to continue as it is.

    Editors write the tokens of a gap into it. Where all of one family are there, and the model has them, they are
    tokens; all other control tokens are text. Raises what `Tokenizer.encode_prompt` raises.
    """
    forms = (form for form in (*_FORMS, _SUFFIX_FIRST) if all(mark in text for mark in form))
    form = next((form for form in forms if all(tokenizer.token_id(mark) is not None for mark in form)), None)
    if form is None:
        return tokenizer.encode_prompt(text)
    marks = "|".join(re.escape(mark) for mark in (*form, *_BESIDE) if tokenizer.token_id(mark) is not None)
    ids = tokenizer.encode_prompt("")
    for part in re.split(f"({marks})", text):
        index = None
        if re.fullmatch(marks, part):
            index = tokenizer.token_id(part)
        if index is None:
            ids += tokenizer.encode(part)
        else:
            ids.append(index)
    return ids
