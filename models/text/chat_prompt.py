"""A conversation as token ids, the beginning of an answer included: what a chat adds to the tokenizer's templates.

Reasoning models wrap their thinking in `<think>` tags. Some templates write the opening tag themselves, at the end
of the prompt: then it is missing in what the model says, and `opening` gives it back, so that a stored answer
always holds the whole section.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.text.thinking import CLOSE, OPEN
from headrace.models.text.tokenizer import Tokenizer

_TAGS = re.compile(f"({OPEN}|{CLOSE})")
_TAIL = 8  # tokens: where an opening tag at the end of a prompt can be


class ChatPrompt:
    """Encodes conversations for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.thinks = template is not None and any(CLOSE in source for source in template.sources.values())

    def encode(
        self, messages: Sequence[Mapping[str, str]], answer: str = "", *, thinking: bool | None = None
    ) -> list[int]:
        """The prompt that asks for the next answer, of which `answer` has been said already.

        thinking: the `enable_thinking` of reasoning models' templates; None leaves it undefined. Other templates
        do not look at it. Raises what `Tokenizer.encode_chat` raises.
        """
        told: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        prompt = self._tokenizer.encode_chat(messages, **told)
        if not answer:
            return prompt
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
