"""The text of a grammar, before it is compiled. Options of an answer hold it: it imports neither MLX nor llguidance."""

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["schema", "regex", "grammar", "tools"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A JSON schema as text (`schema_check.schema_text`), a regular expression, or a Lark grammar."""

    kind: GrammarKind
    text: str
