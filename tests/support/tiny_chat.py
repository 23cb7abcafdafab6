"""A tiny chat model: random llama weights, a byte-level tokenizer and a ChatML template.

The vocabulary is the 256 bytes plus four control tokens, so every text encodes, and answers are noise.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.tiny import config_of, random_tensors

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
IM_END = 258
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_model(directory: Path, *, context: int = 4096, seed: int = 0, **overrides: Any) -> Path:
    """Write a complete model directory; `overrides` go into its config.json."""
    config = {**config_of("llama"), "vocab_size": 256 + len(CONTROL), "max_position_embeddings": context, **overrides}
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), random_tensors(config, seed))
    write_byte_tokenizer(directory)
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"eos_token_id": IM_END})
    return directory


def write_byte_tokenizer(directory: Path, *added: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for 256 bytes and the control tokens.

    added: further control tokens, from 260 on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*CONTROL, *added)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    (directory / "chat_template.jinja").write_text(_TEMPLATE)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content))
