"""Records of the session store: sessions, drafts, messages, attachments, search hits.

They are immutable: a change is written to the store, which returns the new record. `rows.py` reads them from rows of
the file. A new field needs a column (`_SCHEMA` in `database.py`), its reading in `rows.py`, and another `VERSION` in
`database.py`.

Guard: tests/app/sessions/test_store.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from headrace.models.text.thinking import Kinds, TextByKind
from headrace.runtime.metrics.telemetry import Summary

Role = Literal["user", "assistant"]
DAMAGED = "damaged"
"""The `finish_reason` of a message with invalid columns."""
EVERYTHING = "everything"
"""Stands for all columns in `damaged`."""
_TITLE_LENGTH = 60  # characters


class Attachment(Struct, frozen=True):
    """A text file sent with a message."""

    name: str
    text: str


class Message(Struct, frozen=True):
    """One node of a session's tree. `parent_id` None: a first message.

    partial: the answer is being written, was stopped, ended at a limit or was cut off by a crash.
    finish_reason: stop, length, cancelled, died or failed; None while being written, after a crash, for user messages.
    model, sampling, system: of an answer: the model, the settings in effect (`AnswerOptions` fields) and the system
        prompt. None for user messages.
    damaged: columns with invalid values.
    kinds: of an answer's `content`; None: all of it is content.
    """

    id: int
    session_id: str
    parent_id: int | None
    role: Role
    content: str
    created_at: float  # seconds since the epoch
    partial: bool = False
    finish_reason: str | None = None
    model: str | None = None
    metrics: Summary | None = None
    attachments: tuple[Attachment, ...] = ()
    sampling: Mapping[str, object] | None = None
    system: str | None = None
    damaged: tuple[str, ...] = ()
    kinds: Kinds | None = None

    @property
    def by_kind(self) -> TextByKind:
        """The text, by kind."""
        kinds = self.kinds
        if kinds is None:
            kinds = Kinds(content=len(self.content))
        return TextByKind(self.content, kinds)


class Draft(Struct, frozen=True):
    """Unsent text. pastes: the long texts that placeholders in it stand for. False if it is blank."""

    text: str = ""
    pastes: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.text.strip())

    @property
    def whole(self) -> str:
        """Return the text with the pastes in full."""
        if not self.pastes:
            return self.text
        return re.sub("|".join(map(re.escape, self.pastes)), lambda match: self.pastes[match[0]], self.text)


def joined(drafts: Sequence[Draft]) -> Draft:
    """Return several unsent texts as one, with blank lines between them."""
    text = "\n\n".join(draft.text for draft in drafts if draft)
    return Draft(text, {label: pasted for draft in drafts for label, pasted in draft.pastes.items()})


class Session(Struct, frozen=True):
    """A conversation's settings and its active branch.

    model: as after `-m`; None: the default.
    sampling: the `AnswerOptions` fields that are set.
    active_leaf: the last message of the active branch.
    prompt_from: the first message of the prompt; `summary` replaces those before it.
    draft: what was typed and not sent.
    damaged: columns with invalid values.
    """

    id: str
    title: str
    created_at: float
    updated_at: float
    model: str | None = None
    system: str = ""
    sampling: Mapping[str, object] = field(default_factory=dict)
    active_leaf: int | None = None
    prompt_from: int | None = None
    summary: str = ""
    draft: Draft = Draft()
    damaged: tuple[str, ...] = ()


class SessionEntry(Struct, frozen=True):
    """A session in a list. messages: on all branches."""

    session: Session
    messages: int

    @property
    def title(self) -> str:
        """The session's title; without messages, the beginning of its unsent text."""
        if self.session.title or self.messages or not self.session.draft:
            return self.session.title
        return f"unsent: {title_of(self.session.draft.text)}"


class Hit(Struct, frozen=True):
    """A message found by a search. snippet: marks the found words with « »."""

    session_id: str
    title: str
    message_id: int
    role: Role
    created_at: float
    snippet: str


def title_of(content: str, attachments: Sequence[Attachment] = ()) -> str:
    """Return the first visible line, or the names of the attachments, cut to `_TITLE_LENGTH` characters."""
    lines = (line.strip() for line in content.splitlines())
    shown = (line for line in lines if any(character.isprintable() and not character.isspace() for character in line))
    line = next(shown, ", ".join(attachment.name for attachment in attachments))
    if len(line) <= _TITLE_LENGTH:
        return line
    return line[: _TITLE_LENGTH - 1].rstrip() + "…"
