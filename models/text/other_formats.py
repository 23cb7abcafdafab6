"""The tokenizer of a checkpoint that has no tokenizer.json, as the `tokenizers` library's: built in memory from what
it has instead. It costs a second or two of every start for a vocabulary of 130,000 tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.models.checkpoint.json_object import read_json_object
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_other_format(directory: Path, config: Mapping[str, Any]) -> tuple["Tokenizer", dict[str, Any]]:
    """(the tokenizer, what its tokenizer_config.json says or would say). `config`: the one that is there, or empty.

    Raises UnsupportedModelError where there is no file that anything here reads, CheckpointError for a broken one.
    """
    from headrace.models.text.ranked_bytes import is_tiktoken, read_tekken, read_tiktoken
    from headrace.models.text.sentencepiece_model import read_sentencepiece

    try:
        if (file := directory / "tekken.json").is_file():
            usual = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
            return read_tekken(file), usual | _stated(config)
        models = [directory / "tokenizer.model", *sorted(directory.glob("*.tiktoken")), directory / "tiktoken.model"]
        file = next((file for file in models if file.is_file()), directory)
        if file is directory:
            raise UnsupportedModelError(
                f"no tokenizer.json in {directory}",
                hint="nor a tokenizer.model, a tekken.json or a tiktoken file: fetch the whole repository",
            )
        if is_tiktoken(file):
            ends = {"eos_token": "<|im_end|>"} if config.get("tokenizer_class") == "QWenTokenizer" else {}
            return read_tiktoken(file, config), ends | _stated(config)
        tokenizer, usual = read_sentencepiece(file, _added(directory, config))
        return tokenizer, usual | _stated(config)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be read: {error.strerror}") from error


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _added(directory: Path, config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Tokens beyond the vocabulary file's, by id: tokenizer_config.json's, else those of an older added_tokens.json."""
    stated = config.get("added_tokens_decoder")
    if isinstance(stated, Mapping):
        return {int(i): entry for i, entry in stated.items() if str(i).isdigit() and isinstance(entry, Mapping)}
    file = directory / "added_tokens.json"
    if not file.is_file():
        return {}
    found = read_json_object(file)
    return {index: {"content": text, "special": True} for text, index in found.items() if type(index) is int}
