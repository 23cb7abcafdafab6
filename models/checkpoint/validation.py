"""Whether an installed model is still whole: headers, configuration and tokenizer file, without reading weights.

Disks fill, copies stop half-way and people delete files. `check_sound` is what `pull` and `doctor` ask; around a
load, `blamed_on_store` tells the user how to get a damaged entry of the store replaced.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.side_file import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_PARTS,
    check_parts,
    read_side_file,
)
from headrace.runtime.errors import CheckpointError

_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "*tiktoken*")  # see models/text/other_formats.py


def check_sound(directory: Path) -> None:
    """Raises CheckpointError for the first thing that is missing, cut off or unreadable."""
    open_checkpoint(directory)
    if not (directory / "tokenizer.json").exists() and any(any(directory.glob(name)) for name in _OTHER_TOKENIZERS):
        return
    try:
        content = read_side_file(directory / "tokenizer.json", MAX_TOKENIZER_BYTES)
        check_parts(content, MAX_TOKENIZER_PARTS)
        json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from None


@contextmanager
def changed_while_read() -> Iterator[None]:
    """MLX's errors of reading files that were sound when they were opened, as ours: one was cut, or is gone."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(("[read]", "[load_safetensors]")):
            raise
        raise CheckpointError("the weights changed or went away while they were loaded") from error


@contextmanager
def blamed_on_store(stored_as: str | None, directory: Path) -> Iterator[None]:
    """A CheckpointError in this block, if `directory` is a damaged entry of the store, says how to replace it."""
    try:
        yield
    except CheckpointError as error:
        if stored_as is None:
            raise
        try:
            check_sound(directory)
        except CheckpointError as damage:
            raise damaged(stored_as, damage) from error
        raise


def damaged(name: str, damage: CheckpointError) -> CheckpointError:
    """The error for the store's entry `name`, with what to do about it."""
    return CheckpointError(
        f"the stored model {name} is damaged: {damage}",
        f"pulling it again replaces it; `headrace models rm {name}` removes it",
    )
