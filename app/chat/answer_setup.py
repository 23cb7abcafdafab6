"""What an answer is made with: a model, a system prompt and sampling settings; and the request that asks for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.app.answer.sampling_options import CHAT_SAMPLING, chat_sampling
from headrace.app.chat.prompt import prompt_messages
from headrace.app.engine.messages import Generate, ModelCard
from headrace.app.sessions.records import Message, Session


@dataclass(frozen=True, slots=True)
class AnswerSetup:
    """model: as after `-m`, None for the default. sampling: as a session has it, only what is set."""

    model: str | None = None
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> "AnswerSetup":
        return cls(session.model, session.system, dict(session.sampling))

    def applied(self, session: Session) -> Session:
        """The session as if this were its setup. What is stored stays as it is."""
        return replace(session, model=self.model, system=self.system, sampling=self.sampling)

    @property
    def model_name(self) -> str:
        from headrace.models.registry.resolve import DEFAULT_MODEL  # whose module reads files: no part of the start

        return self.model or DEFAULT_MODEL


def settings_used(given: Mapping[str, Any], card: ModelCard | None) -> dict[str, Any]:
    """The settings in effect where `given` are set: those, the model's as far as it is loaded, the chat's own."""
    used = chat_sampling(given, card.generation_defaults if card else {})
    del used["logit_bias"]  # which the chat has no setting for
    return used


def answer_request(
    id: int,
    session: Session,
    branch: Sequence[Message],
    *,
    sampling: Mapping[str, Any] | None = None,
    continuing: bool = False,
    drop_oldest: bool = False,
) -> Generate:
    """Ask for an answer to this branch; with `continuing` its last message is the answer so far.

    sampling: in place of the session's.
    """
    given = dict(session.sampling if sampling is None else sampling)
    return Generate(
        id=id,
        messages=prompt_messages(session, branch[:-1] if continuing else branch),
        max_tokens=given.pop("max_tokens", None),
        stop=tuple(given.pop("stop", ())),
        thinking=given.pop("thinking", None),
        speculate=given.pop("speculate", None),
        sampling=given,
        otherwise=CHAT_SAMPLING,
        continue_text=branch[-1].content if continuing else "",
        drop_oldest=drop_oldest,
    )
