"""The prompt of a request, as long as it may be: too long a one is refused, or goes without its oldest turns."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from headrace.app.engine.messages import ContextFull, Dropped, Event, Generate
from headrace.models.text.chat_prompt import ChatPrompt

LEAST_ROOM = 256  # tokens an answer should have; an eighth of the context where that is less
_ROOMY = 0.75  # of the context: what a prompt may take after oldest turns were dropped, so that more turns fit

Messages = Sequence[Mapping[str, str]]


class PromptFit:
    """Prompts for one model. longest: tokens a prompt may have."""

    def __init__(self, prompts: ChatPrompt, context_limit: int) -> None:
        self._prompts = prompts
        self._limit = context_limit
        self.longest = context_limit - min(LEAST_ROOM, context_limit // 8)

    def fit(self, command: Generate, send: Callable[[Event], None]) -> list[int] | None:
        """The prompt's ids, oldest turns dropped if that was asked for; None (and ContextFull sent) if it is too long.

        Raises UsageError and CheckpointError (see `Tokenizer.encode_chat`).
        """
        prompt = self._encode(command)
        if len(prompt) <= self.longest:
            return prompt
        if command.drop_oldest and (starts := _turn_starts(command.messages)):
            most = self._limit * _ROOMY
            roomy = bisect_left(starts, True, key=lambda count: len(self._encode(command, count)) <= most)
            count = starts[min(roomy, len(starts) - 1)]
            shorter = self._encode(command, count)
            if len(shorter) <= self.longest:
                send(Dropped(command.id, count))
                return shorter
        send(ContextFull(command.id, len(prompt), self._limit))
        return None

    def _encode(self, command: Generate, without: int = 0) -> list[int]:
        """The prompt's ids, the first `without` messages left out."""
        messages = _without(command.messages, without)
        return self._prompts.encode(messages, command.continue_text, thinking=command.thinking)


def _turn_starts(messages: Messages) -> list[int]:
    """How many messages may be left out so that what remains begins with a user's; the last turn always remains."""
    turns = messages[_system(messages) :]
    return [i for i, message in enumerate(turns) if i > 0 and message["role"] == "user"]


def _without(messages: Messages, count: int) -> list[Mapping[str, str]]:
    """All but the first `count` messages after the system message."""
    system = _system(messages)
    return [*messages[:system], *messages[system + count :]]


def _system(messages: Messages) -> int:
    return int(bool(messages) and messages[0]["role"] == "system")
