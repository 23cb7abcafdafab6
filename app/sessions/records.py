"""What the session store gives back: sessions, messages, metrics, search hits. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.runtime.metrics.telemetry import Summary

Role = Literal["user", "assistant"]
DAMAGED = "damaged"
"""The `finish_reason` of a message of which the file holds something else than it should."""
EVERYTHING = "everything"
"""In place of the damaged columns: none can be read."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file sent along with a message."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """One node of a session's tree. `parent_id` None: a first message.

    partial: the answer is being written, was stopped, ran into a limit or was cut off by a crash.
    finish_reason: stop, length, cancelled, died or failed; None while being written, after a crash, for user messages.
    model, sampling, system: who answered, with which settings in effect (SamplingParams fields, max_tokens, stop,
    thinking) and which system prompt. None for user messages, and where an earlier version did not store it.
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
    sampling: Mapping[str, Any] | None = None
    system: str | None = None
    damaged: tuple[str, ...] = ()  # columns that hold something else than they should


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation's settings and where it stands.

    model: as after `-m`, None for the default. sampling: SamplingParams fields, max_tokens and stop, as far as set.
    active_leaf: the last message of the branch that is shown. prompt_from: messages before this one are no longer
    sent to the model; `summary` stands in for them if there is one.
    """

    id: str
    title: str
    created_at: float
    updated_at: float
    model: str | None = None
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    active_leaf: int | None = None
    prompt_from: int | None = None
    summary: str = ""
    damaged: tuple[str, ...] = ()  # columns that hold something else than they should


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A session in a list."""

    session: Session
    messages: int  # on all branches


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that matches a search. `snippet` marks the words found with « »."""

    session_id: str
    title: str
    message_id: int
    role: Role
    created_at: float
    snippet: str
