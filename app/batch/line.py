"""Lines of a batch: requests in any form, and lines that have none.

`parse.py` makes them, `run_batch.py` answers them and `result.py` writes their results. The digest links a result to
its line: a resumed batch answers the lines without a result of their digest.

Guard: tests/app/batch/test_parse.py.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from headrace.app.answer.call import Call
from headrace.app.answer.options import AnswerOptions
from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import HeadraceError, UsageError

Form = Literal["plain", "chat.completion", "text_completion"]
"""Form of a line, and of its result."""


class BatchDefaults(Struct, frozen=True):
    """Defaults of all lines.

    options: of the command and the settings file, where a line does not set them.
    written: options from the settings file with their numbers as written there, for digests: in JSON, 1 is not 1.0.
    recommended: the catalog's sampling, for digests; that of the model's files is part of `identity`.
    system: system prompt of conversations without one.
    raw: a prompt is continued as it is, without a chat template.
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


class BatchLine(Struct, frozen=True):
    """A request.

    number: of the line, from 1.
    name: its own `id` or `custom_id`; None without.
    form: of the line, and of its result.
    call: the request as it is written.
    options: those of the line over the defaults of all lines.
    digest: of everything that decides its answer (`parse._identity`).
    """

    number: int
    name: str | int | None
    form: Form
    call: Call
    options: AnswerOptions
    digest: str

    @property
    def prompt(self) -> Sequence[Mapping[str, object]] | str:
        """A conversation, or a text to continue as it is."""
        if self.call.prompts:
            return self.call.prompts[0]
        return self.call.messages


class BadLine(Struct, frozen=True):
    """A line without a valid request; `error` says why. Fields as of `BatchLine`; digest: of the line itself."""

    number: int
    name: str | int | None
    form: Form
    error: HeadraceError
    digest: str


Conversation = Sequence[Mapping[str, object]]


def refuse_unknown(given: Mapping[str, object], known: frozenset[str], where: str = "") -> None:
    """Raise UsageError that names the first unknown key. where: said after the key."""
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {shown(key)}{where}")


def with_system(messages: Conversation, system: str) -> Conversation:
    """Return a conversation with `system` before it, unless that is empty or it begins with a system message."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]
