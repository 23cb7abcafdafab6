"""Log probabilities of tokens: the request for them, and OpenAI's forms of the reports.

Guards: tests/app/server/test_openai.py.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from headrace.models.text.events import TokenReport
from headrace.runtime.config.value_types import Flag, Whole, read_value
from headrace.runtime.errors import UsageError

MAX_TOP_LOGPROBS = 20  # of chats; completions have `app.answer.openai_form.MAX_LOGPROBS`, 5
"""Best tokens that are reported with each token, in OpenAI's form."""
MIN_LOGPROB = -9999.0
"""Stands for a log probability of minus infinity, which JSON cannot have; the value of OpenAI's API."""


def read_logprobs(wanted: object, top: object) -> int | None:
    """Return the number of best tokens that `logprobs` and `top_logprobs` ask for; None: off. Raises UsageError."""
    count = 0
    if top is not None:
        count = read_value(Whole(0, MAX_TOP_LOGPROBS), "top_logprobs", top)
    on = wanted is not None and read_value(Flag(), "logprobs", wanted)
    if on:
        return count
    if count:
        raise UsageError("top_logprobs needs logprobs: true")
    return None


def chat_logprobs(tokens: Sequence[TokenReport]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat completion."""
    return {
        "content": [
            {
                **_report(token.text, token.logprob, token.data),
                # `top_data` is empty if every text has its own bytes.
                "top_logprobs": [
                    _report(text, logprob, data)
                    for (text, logprob), data in itertools.zip_longest(token.top, token.top_data)
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def text_logprobs(tokens: Sequence[TokenReport], position: int = 0) -> dict[str, object]:
    """Return the `logprobs` object of a completion. position: of the first token in the text, in characters."""
    offsets = []
    for token in tokens:
        offsets.append(position)
        position += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in tokens],
        "top_logprobs": [{text: max(logprob, MIN_LOGPROB) for text, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _report(text: str, logprob: float, data: bytes | None) -> dict[str, object]:
    """Return a token's report. data: its bytes if they are not those of the text.

    A text with U+FFFD stands for bytes that are no whole character; without `data` they are unknown.
    """
    if data is None and "\ufffd" not in text:
        data = text.encode("utf-8", "surrogatepass")
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": None if data is None else list(data)}
