"""A conversation as token ids, the beginning of an answer included: what a chat adds to the tokenizer's templates.

Reasoning models wrap their thinking in `<think>` tags. Some templates write the opening tag themselves, at the end
of the prompt: then it is missing in what the model says, and `opening` gives it back, so that a stored answer
always holds the whole section.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.text.thinking import CLOSE, OPEN, split_thinking
from headrace.models.text.tokenizer import Tokenizer

_TAGS = re.compile(f"({OPEN}|{CLOSE})")
_TAIL = 8  # tokens: where an opening tag at the end of a prompt can be


class ChatPrompt:
    """Encodes conversations for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.thinks = template is not None and any(CLOSE in source for source in template.sources.values())
        self.thinks = self.thinks or tokenizer.thinking_form is not None

    def encode(
        self, messages: Sequence[Mapping[str, str]], answer: str = "", *, thinking: bool | None = None
    ) -> list[int]:
        """The prompt that asks for the next answer, of which `answer` has been said already.

        thinking: the `enable_thinking` of reasoning models' templates; None leaves it undefined. Other templates
        do not look at it. Raises what `Tokenizer.encode_chat` raises.
        """
        told: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        form = self._tokenizer.thinking_form
        prompt = self._tokenizer.encode_chat(messages if form is None else _apart(messages), **told)
        if not answer:
            return prompt
        if form is not None:
            said = form.native(answer)
            return prompt + [token for part, special in said for token in self._tokenizer.encode(part, special=special)]
        if self.opening(prompt):
            answer = answer.removeprefix(OPEN).removeprefix("\n")
        if not self.thinks:
            return prompt + self._tokenizer.encode(answer)
        # The tags are control tokens for these models and text for the others.
        parts = [part for part in _TAGS.split(answer) if part]
        return prompt + [
            token for part in parts for token in self._tokenizer.encode(part, special=part in (OPEN, CLOSE))
        ]

    def opening(self, prompt: Sequence[int]) -> str:
        """What the template has written of the answer itself: an opening tag, or nothing."""
        if not self.thinks:
            return ""
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False)
        return f"{OPEN}\n" if tail.rstrip().endswith(OPEN) else ""


def _apart(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Thinking in fields of its own, by the names that templates use: theirs is not the form it is stored in."""
    told: list[dict[str, str]] = []
    for message in messages:
        parts = split_thinking(message.get("content", "")) if message.get("role") == "assistant" else None
        if parts is None or parts.thinking is None:
            told.append(dict(message))
            continue
        thinking = {"thinking": parts.thinking, "reasoning_content": parts.thinking}
        told.append({**message, "content": parts.answer, **thinking})
    return told
