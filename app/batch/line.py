"""What a request of a batch is, once its line is understood: one shape for every way of writing it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.runtime.errors import HeadraceError

Form = Literal["plain", "chat.completion", "text_completion"]
"""How a line is written, and so its result."""


@dataclass(frozen=True)
class Defaults:
    """What holds for every line that says nothing else. options: by the names of `app.batch.options.OPTIONS`.

    model: who answers. names: what a line may call it in `model`; None: whatever it says. identity: what else decides
    an answer (which files of that name, the context limit), part of every digest.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    raw: bool = False
    model: str = ""
    names: frozenset[str] | None = None
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One request. messages: a conversation; None where `prompt` is a text to continue as it is.

    number: of the line, from 1. name: its own `id` or `custom_id`.
    """

    number: int
    name: str | int | None
    form: Form
    messages: Sequence[Mapping[str, str]] | None
    prompt: str
    options: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that asks for nothing that can be done."""

    number: int
    name: str | int | None
    form: Form
    error: HeadraceError
    digest: str
