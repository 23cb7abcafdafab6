"""Prompts for the text in a gap, with the fill-in-the-middle tokens of code models.

Sources of the orders: the model cards of StarCoder, Qwen2.5-Coder, CodeGemma and DeepSeek-Coder (prefix, suffix,
middle) and of Codestral (suffix, prefix).
"""

from typing import TYPE_CHECKING

from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.models.text.tokenizer import Tokenizer

_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")


def fill_in_middle(tokenizer: "Tokenizer", prefix: str, suffix: str) -> list[int]:
    """Return the prompt whose continuation is the text between both. Raises UsageError for a model without such tokens.

    Raises what `Tokenizer.encode_prompt` raises.
    """
    vocabulary = {text: token for token, text in tokenizer.vocabulary().items()}
    start = tokenizer.encode_prompt("")
    before, after = tokenizer.encode(prefix), tokenizer.encode(suffix)
    for form in _FORMS:
        if all(text in vocabulary for text in form):
            opening, gap, end = (vocabulary[text] for text in form)
            return [*start, opening, *before, gap, *after, end]
    if all(text in vocabulary for text in _SUFFIX_FIRST):
        first, second = (vocabulary[text] for text in _SUFFIX_FIRST)
        return [*start, first, *after, second, *before]
    raise UsageError("suffix: the model has no fill-in-the-middle tokens", "leave it out, or use a code model")
