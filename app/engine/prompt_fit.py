"""Prompts within the context limit: a too long one is refused, or goes without its oldest turns.

`EngineHost` fits every prompt. It only reports the turns left out (`Dropped`), or that nothing fits (`ContextFull`);
the choice is the chat's (`app.chat.context_trimming`).

Guard: tests/app/engine/test_client.py.
"""

from bisect import bisect_left
from collections.abc import Callable

from headrace.app.answer.call import Messages
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import ContextFull, Dropped, Event
from headrace.models.text.chat_prompt import ChatPrompt

MIN_ANSWER_TOKENS = 256  # reserved for an answer; at most an eighth of the context
_FILL_AFTER_DROP = 0.75  # of the context: room for more turns before the next drop


class PromptFit:
    """Prompts of one model. longest: tokens of a prompt that leaves room for an answer."""

    def __init__(self, prompts: ChatPrompt, context_limit: int, *, whole: bool = False) -> None:
        """whole: a prompt may take the whole context."""
        self._prompts = prompts
        self._limit = context_limit
        self.longest = context_limit
        if not whole:
            self.longest -= min(MIN_ANSWER_TOKENS, context_limit // 8)

    def fit(self, command: Generate, send: Callable[[Event], None]) -> list[int] | None:
        """Return the prompt's ids, without the oldest turns if `drop_oldest`; None (ContextFull sent) if too long.

        Raises UsageError and CheckpointError (see `Tokenizer.encode_chat`).
        """
        prompt = self._encode(command)
        if len(prompt) <= self.longest:
            return prompt
        starts = _turn_starts(command.messages)
        if command.drop_oldest and starts:
            # The fewest turns to drop: prompts get shorter with each, so a binary search finds the first that fits. If
            # none does, only the last turn stays, which may take all of the room.
            limit = self._limit * _FILL_AFTER_DROP
            index = bisect_left(starts, True, key=lambda count: len(self._encode(command, count)) <= limit)
            count = starts[min(index, len(starts) - 1)]
            shorter = self._encode(command, count)
            if len(shorter) <= self.longest:
                send(Dropped(command.id, count))
                return shorter
        send(ContextFull(command.id, len(prompt), self._limit, self.last_turn_fits(command)))
        return None

    def last_turn_fits(self, command: Generate, answer_tokens: int = 0) -> bool:
        """Return True if the prompt without older turns, and an answer so far, leave room to go on."""
        starts = _turn_starts(command.messages)
        return bool(starts) and len(self._encode(command, starts[-1])) + answer_tokens <= self.longest

    def _encode(self, command: Generate, dropped: int = 0) -> list[int]:
        """Return the prompt's ids without the first `dropped` messages after the system message."""
        if command.prompt is not None:
            return self._prompts.continued(command.prompt, command.suffix)
        system = _system(command.messages)
        messages = [*command.messages[:system], *command.messages[system + dropped :]]
        options = command.options
        return self._prompts.encode(
            messages,
            command.begun,
            thinking=options.thinking,
            tools=command.tools,
            variables=options.chat_template_kwargs,
        )


def _turn_starts(messages: Messages) -> list[int]:
    """Return the counts of messages that can be dropped, so that the rest begins with a user's; the last turn stays."""
    turns = messages[_system(messages) :]
    return [i for i, message in enumerate(turns) if i > 0 and message["role"] == "user"]


def _system(messages: Messages) -> int:
    """Return the number of system messages at the start, 0 or 1."""
    return int(bool(messages) and messages[0]["role"] == "system")
