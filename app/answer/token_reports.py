"""Tokens of an answer with their log probabilities, and OpenAI's form of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.runtime.config.value_types import Flag, Whole, read_value
from headrace.runtime.engine.request import Step
from headrace.runtime.errors import UsageError

MOST = 20
"""Best tokens that are reported with each token, in OpenAI's form."""
LEAST = -9999.0
"""Stands for a log probability of minus infinity."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token's text and log probability, and the best tokens of its step in order."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]]


def read_logprobs(wanted: object, top: object) -> int | None:
    """Return the number of best tokens that `logprobs` and `top_logprobs` ask for; None: off. Raises UsageError."""
    count = 0 if top is None else read_value(Whole(0, MOST), "top_logprobs", top)
    on = wanted is not None and read_value(Flag(), "logprobs", wanted)
    if count and not on:
        raise UsageError("top_logprobs needs logprobs: true")
    return count if on else None


def token_reports(step: Step, text_of: Callable[[int], str]) -> list[TokenReport]:
    """Return the reports of a step's tokens; none if they were not requested. text_of: returns the text of a token."""
    return [
        TokenReport(text_of(token), found.chosen, [(text_of(other), value) for other, value in found.top])
        for token, found in zip(step.tokens, step.logprobs or (), strict=False)
    ]


def chat_logprobs(tokens: Sequence[TokenReport]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat completion."""
    return {
        "content": [
            {**_report(token.text, token.logprob), "top_logprobs": [_report(*pair) for pair in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def _report(text: str, logprob: float) -> dict[str, Any]:
    part = None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": part}
