"""Pre-tokenizers of byte-level BPE by their `tokenizer.ggml.pre` names.

Each name stands for a sequence of patterns; each splits the pieces left by the one before. The patterns are facts of
the models, listed in llama.cpp's `llama-vocab.cpp` under these names.
"""

from dataclasses import dataclass

from headrace.runtime.errors import UnsupportedModelError


@dataclass(frozen=True)
class PreTokenizer:
    """whole_words: a word that is a token is not split by merges. add_bos: the default."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# Letters except a-z, then letters except A-Z: case in ASCII, any letter elsewhere.
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+(?:{_CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*(?:{_CONTRACTIONS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_EXAONE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Letters of Kimi's words: Chinese characters are words of their own.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTIONS})?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

_BY_NAME = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "seed-coder": PreTokenizer((_SEED,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "exaone-moe": PreTokenizer((_EXAONE,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "bloom": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}
_SAME_AS = {
    "phi-2": "gpt-2",
    "exaone4": "gpt-2",
    "jina-v2-de": "gpt-2",
    "gigachat": "gpt-2",
    "glm4": "smaug-bpe",
    "chatglm-bpe": "smaug-bpe",
    "lfm2": "llama-bpe",
    "falcon-h1": "llama-bpe",
    "midm-2.0": "llama-bpe",
    "a.x-4.0": "gpt-2",
    "mellum": "gpt-2",
    "hunyuan": "qwen2",
    "kormo": "qwen2",
    "hunyuan-dense": "deepseek-v3",
    "llama4": "gpt-4o",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "minerva-7b": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "dbrx": "smaug-bpe",
    "stablelm2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "solar-open": "qwen2",
    "f2llmv2": "qwen2",
    "grok-2": "qwen2",
    "minimax-m2": "gpt-4o",
    "kanana2": "gpt-4o",
    "bailingmoe": "qwen2",  # its runs of newlines end alike
    "bailingmoe2": "qwen2",
    "llada-moe": "qwen2",
    "joyai-llm": "deepseek-v3",
    "mellum2": "smollm",
    "trillion": "gpt-2",
    "granite-docling": "gpt-2",
    "jais": "gpt-2",
    "poro-chat": "bloom",
    "gpt3-finnish": "bloom",
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of a GGUF name. Raises UnsupportedModelError for an unknown one."""
    known = _BY_NAME.get(_SAME_AS.get(name, name))
    if known is None:
        raise UnsupportedModelError(f"the tokenizer's pre-tokenizer {name!r} is not supported")
    return known
