"""Files with a JSON schema or a grammar, as the command line and /schema of the chat name them."""

from pathlib import Path

from headrace.app.config.bounded_input import decoded, read_bounded
from headrace.models.text.structured.schema_check import MAX_BYTES


def is_schema(text: str) -> bool:
    """Return whether a text is a schema itself, and not the name of its file."""
    return text.lstrip().startswith("{") or text in ("object", "true", "false")


def read_grammar_file(name: str) -> str:
    """Return a schema's or a grammar's text from its file. Raises UsageError."""
    return decoded(read_bounded(Path(name).expanduser(), MAX_BYTES), name)
