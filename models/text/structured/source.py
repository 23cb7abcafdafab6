"""The text of a grammar, before it is compiled. Options of an answer hold it: it imports neither MLX nor llguidance."""

from typing import Literal

from msgspec import Struct

GrammarKind = Literal["schema", "regex", "grammar", "tools"]


class GrammarSource(Struct, frozen=True):
    """A JSON schema as text (`schema_check.schema_text`), a regular expression, or a Lark grammar."""

    kind: GrammarKind
    text: str
