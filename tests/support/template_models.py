"""Tiny models with chat templates of choice: one for each template, in the store of a home folder."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.models.registry.store import Store
from tests.support.tiny_chat import CONTROL, write_byte_tokenizer, write_chat_model

# Control tokens of most families, as their templates spell them
_TOKENS = re.compile(
    r"""
      <\| [^<>\s'"{}+|]+ \|>    # <|im_start|>
    | <｜ [^<>\s'"{}]+ ｜>      # <｜User｜> of DeepSeek
    | \[ /? [A-Z_]{4,} \]       # [INST] and [/INST] of Mistral
    | <\| [a-z_]+ >             # <|turn> of Gemma 4
    | < [a-z_]+ \|>             # <turn|>
    | <(?:start|end)_of_turn>   # of Gemma before
    """,
    re.VERBOSE,
)


def install_templates(home: Path, templates: Mapping[str, str], *, context: int = 32_768) -> None:
    """Install a tiny model for each template, under its name."""
    for number, (name, template) in enumerate(templates.items()):
        Store(home / "data" / "models").install(name, _builder(name, template, number, context))


def _builder(name: str, template: str, seed: int, context: int) -> Any:
    def build(directory: Path) -> dict[str, Any]:
        tokens = [token for token in dict.fromkeys(_TOKENS.findall(template)) if token not in CONTROL]
        vocabulary = 256 + len(CONTROL) + len(tokens)
        made = write_chat_model(directory / "made", context=context, seed=seed, vocab_size=vocabulary)
        write_byte_tokenizer(made, *tokens)
        config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        (made / "tokenizer_config.json").write_text(json.dumps(config))
        (made / "chat_template.jinja").write_text(template)
        for file in made.iterdir():
            file.rename(directory / file.name)
        made.rmdir()
        return {"id": name}

    return build
