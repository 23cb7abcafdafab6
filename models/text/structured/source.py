"""The text of a grammar, before it is compiled. Options of an answer have it: it imports neither MLX nor llguidance.

Guard: tests/models/text/structured/test_grammars.py.
"""

from typing import Literal

from msgspec import Struct

GrammarKind = Literal["schema", "regex", "grammar", "tools"]
"""Kinds of grammars. `grammars.py` alone uses "tools", for calls of tools without a source."""


class GrammarSource(Struct, frozen=True):
    """A JSON schema as text (`schema_check.schema_text`), a regular expression, or a Lark grammar."""

    kind: GrammarKind
    text: str
