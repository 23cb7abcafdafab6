"""The setup of an answer (model, system prompt, sampling), its request, and settings for another answer.

Used by the conversation, and by `/compare` and `/again`. A session stores sampling as plain values by option name;
`stored_options` alone makes options of them, and `AnswerOptions.stored` writes them.

Guards: tests/app/chat/test_comparison_engines.py, test_comparison.py and tests/tui/test_sampling.py.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.app.answer.options import OPTIONS, AnswerOptions, recommended_options
from headrace.app.chat.prompt import prompt_messages
from headrace.app.chat.session_branch import SessionBranch
from headrace.app.engine.commands import Generate
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message, Session
from headrace.models.text.thinking import NO_TEXT
from headrace.runtime.errors import UsageError

_SEEDS = 2**64  # a seed has 64 bits
WARM = AnswerOptions(temperature=0.7, min_p=0.05)
"""Sampling of another answer in place of greedy decoding."""
WARMER = f"temperature 0 would repeat the answer: sampled at {WARM.temperature}"


class AnswerSetup(Struct, frozen=True):
    """Model, system prompt and sampling of an answer.

    model: as after `-m`; None: the default.
    system: "" for none.
    sampling: the options that are set, as a session stores them; `stored_options` reads them.
    """

    model: str | None = None
    system: str = ""
    sampling: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> "AnswerSetup":
        return cls(session.model, session.system, dict(session.sampling))

    def applied(self, session: Session) -> Session:
        """Return the session with this setup; the stored one stays as it is."""
        return replace(session, model=self.model, system=self.system, sampling=self.sampling)

    @property
    def model_name(self) -> str:
        from headrace.models.registry.resolve import DEFAULT_MODEL  # its imports would delay the first frame

        return self.model or DEFAULT_MODEL


def stored_options(sampling: Mapping[str, object]) -> AnswerOptions:
    """Return a session's sampling as options, without unknown names. Raises UsageError for a value out of range."""
    return AnswerOptions.read({name: value for name, value in sampling.items() if name in OPTIONS})


def settings_used(sampling: Mapping[str, object], card: ModelCard | None) -> dict[str, object]:
    """Return the settings in effect: a session's, else the model's once it is loaded, as they are stored."""
    try:
        options = stored_options(sampling)
        if card is not None:
            options = options.resolved(recommended_options(card.generation_defaults))
        return options.stored()
    except UsageError:  # reported when a message is sent
        return dict(sampling)


def answer_request(
    id: int,
    session: Session,
    branch: Sequence[Message],
    *,
    continuing: bool = False,
    drop_oldest: bool = False,
) -> Generate:
    """Return the request for an answer to this branch. Raises UsageError for settings out of range.

    id: of the generation.
    branch: first to last; its last message is the answer so far if `continuing`, else the question.
    drop_oldest: see `Generate`.
    """
    begun = NO_TEXT
    if continuing:
        begun = branch[-1].by_kind
        branch = branch[:-1]
    messages = prompt_messages(session, branch)
    return Generate(id, messages, stored_options(session.sampling), begun=begun, drop_oldest=drop_oldest)


def question_of(branch: SessionBranch, message_id: int | None) -> tuple[int, bool]:
    """Return the id of the question that this message (None: the last) asks or answers, and if the branch answers it.

    Raises UsageError if there is none.
    """
    if not branch.messages:
        raise UsageError("nothing was asked yet")
    chosen = branch.messages[-1]
    if message_id is not None:
        chosen = branch.message(message_id)
    question = chosen.parent_id
    if chosen.role == "user":
        question = chosen.id
    if question is None:
        raise UsageError("no question stands before this answer")
    return question, any(message.parent_id == question for message in branch.messages)


def resampled(branch: SessionBranch, question: int, *, greedy: bool, later: int = 0) -> dict[str, object]:
    """Return the settings of one more answer, after `later` others: another seed, no greedy sampling.

    greedy: the session's settings are greedy. Without a seed in the settings, none is set.
    """
    sampling = dict(branch.session.sampling)
    if greedy:
        sampling |= WARM.given()
    seed = sampling.get("seed")
    if isinstance(seed, int):
        answer = next((message for message in branch.messages if message.parent_id == question), None)
        existing = 0
        if answer is not None:
            existing = len(branch.store.alternatives(answer))
        # The question's first answer has `seed`, each further one the next.
        sampling["seed"] = (seed + existing + later) % _SEEDS
    return sampling
