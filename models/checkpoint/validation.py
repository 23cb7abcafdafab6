"""Integrity of an installed model: headers, configuration and tokenizer file, without reading weights.

`pull` and `doctor` use `check_sound`. During a load, `report_store_damage` adds how to replace a damaged store entry.

Guards: tests/faults/test_side_files.py, and tests/app/cli/test_doctor.py for the store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.side_file import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_PARTS,
    check_parts,
    has_side_file,
    parse_json,
    read_side_file,
)
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "*tiktoken*")  # see models/text/other_formats.py


def check_sound(directory: Path) -> None:
    """Raise CheckpointError for the first missing, truncated or unreadable file."""
    open_checkpoint(directory)
    if not has_side_file(directory / "tokenizer.json") and any(any(directory.glob(name)) for name in _OTHER_TOKENIZERS):
        return
    try:
        content = read_side_file(directory / "tokenizer.json", MAX_TOKENIZER_BYTES)
        check_parts(content, MAX_TOKENIZER_PARTS)
        parse_json(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from None


@contextmanager
def convert_read_errors() -> Iterator[None]:
    """Convert MLX's read errors to CheckpointError: a checked file has been truncated or deleted since."""
    try:
        yield
    except RuntimeError as error:
        # MLX has one class for all its errors: those of its readers begin with the reader's name.
        if not str(error).startswith(("[read]", "[load_safetensors]")):
            raise
        raise CheckpointError("the weights changed or went away while they were loaded") from error


@contextmanager
def report_store_damage(stored_as: str | None, directory: Path) -> Iterator[None]:
    """Name the store entry in a CheckpointError of this block, if `directory` is damaged.

    stored_as: None for a folder outside of the store. Errors of its files get a hint if they have none.
    """
    try:
        yield
    except CheckpointError as error:
        if stored_as is None:
            if not isinstance(error, UnsupportedModelError):  # whose files are sound
                error.hint = error.hint or f"fetch or convert the whole folder {directory.name} anew"
            raise
        try:
            check_sound(directory)
        except CheckpointError as damage:
            raise damaged(stored_as, damage) from error
        raise


def damaged(name: str, damage: CheckpointError) -> CheckpointError:
    """Return the error for the store's entry `name`, with the commands that repair it."""
    return CheckpointError(
        f"the stored model {name} is damaged: {damage}",
        damage.hint or f"pulling it again replaces it; `headrace models rm {name}` removes it",
    )
