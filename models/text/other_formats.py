"""Tokenizers from formats other than tokenizer.json, built in memory at each start.

`Tokenizer.load` calls it for a directory without a tokenizer.json: `ranked_bytes`, `longest_match` and
`sentencepiece_model` read the files.

Guard: tests/models/text/test_other_formats.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.models.checkpoint.json_object import read_json_object, without_nulls
from headrace.models.checkpoint.side_file import has_side_file
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_other_format(directory: Path, config: Mapping[str, object]) -> tuple["Tokenizer", dict[str, object]]:
    """Return (the tokenizer, its tokenizer_config.json or an equivalent). config: the existing one, or empty.

    Raises UnsupportedModelError if there is no supported file, CheckpointError for a broken one.
    """
    from headrace.models.text.longest_match import read_world
    from headrace.models.text.ranked_bytes import is_tiktoken, read_tekken, read_tiktoken
    from headrace.models.text.sentencepiece_model import read_sentencepiece

    try:
        file = directory / "tekken.json"
        if file.is_file():
            usual = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
            return read_tekken(file), usual | without_nulls(config)
        worlds = sorted(directory.glob("rwkv_vocab_*.txt"))
        if worlds:
            return read_world(worlds[-1], _added(directory, config)), without_nulls(config)
        models = [directory / "tokenizer.model", *sorted(directory.glob("*.tiktoken")), directory / "tiktoken.model"]
        file = next((file for file in models if file.is_file()), directory)
        if file is directory:
            raise UnsupportedModelError(
                f"no tokenizer.json in {directory}",
                hint="nor a tokenizer.model, a tekken.json, a tiktoken or RWKV vocabulary: fetch the whole repository",
            )
        if is_tiktoken(file):  # a tokenizer.model may be one, too
            ends: dict[str, object] = {}
            if config.get("tokenizer_class") == "QWenTokenizer":
                ends["eos_token"] = "<|im_end|>"
            return read_tiktoken(file, config), ends | without_nulls(config)
        tokenizer, usual = read_sentencepiece(file, _added(directory, config))
        return tokenizer, usual | without_nulls(config)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be read: {error.strerror}") from error


def _added(directory: Path, config: Mapping[str, object]) -> dict[int, Mapping[str, object]]:
    """Return tokens outside the vocabulary file by id, from tokenizer_config.json or an older added_tokens.json."""
    stated = config.get("added_tokens_decoder")
    if isinstance(stated, Mapping):
        numbered = {index: entry for index, entry in stated.items() if index.isdecimal() and len(index) < 10}
        return {int(index): entry for index, entry in numbered.items() if isinstance(entry, Mapping)}
    file = directory / "added_tokens.json"
    if not has_side_file(file):
        return {}
    document = read_json_object(file)
    return {index: {"content": text, "special": True} for text, index in document.items() if type(index) is int}
