"""Lines of a batch: requests in any form, and lines that have none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.app.answer.call import Call
from headrace.app.answer.options import AnswerOptions
from headrace.runtime.errors import HeadraceError

Form = Literal["plain", "chat.completion", "text_completion"]
"""Form of a line, and of its result."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of all lines.

    written: options from the settings file with their numbers as written there, for digests: in JSON, 1 is not 1.0.
    recommended: the catalog's sampling, for digests; that of the model's files is part of `identity`.
    model: the model that answers.
    names: names that a line's `model` may have; None: any.
    identity: whatever else decides an answer (the model's files, the context limit), as part of every digest.
    """

    options: AnswerOptions = field(default_factory=AnswerOptions)
    written: Mapping[str, object] = field(default_factory=dict)
    recommended: Mapping[str, float] = field(default_factory=dict)
    system: str = ""
    raw: bool = False
    model: str = ""
    names: frozenset[str] | None = None
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A request. number: of the line, from 1. name: its own `id` or `custom_id`. options: over the defaults."""

    number: int
    name: str | int | None
    form: Form
    call: Call
    options: AnswerOptions
    digest: str

    @property
    def prompt(self) -> Sequence[Mapping[str, object]] | str:
        """A conversation, or a text to continue as it is."""
        return self.call.prompts[0] if self.call.prompts else self.call.messages


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line without a valid request."""

    number: int
    name: str | int | None
    form: Form
    error: HeadraceError
    digest: str
