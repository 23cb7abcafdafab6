"""The text of a grammar, before it is compiled. Imports nothing: options of an answer hold it."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["schema", "regex", "grammar", "tools"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A JSON schema as text (`schema_check.schema_text`), a regular expression, or a Lark grammar."""

    kind: Kind
    text: str
