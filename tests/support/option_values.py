"""A value of each answer option that changes an answer."""

from typing import Any

VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {"5": 1.0},
    "seed": 7,
    "max_tokens": 3,
    "stop": ["x"],
    "speculate": "off",
    "thinking": True,
    "chat_template_kwargs": {"enable_thinking": True},
    "schema": {"type": "object"},
    "regex": "a",
    "grammar": 'start: "a"',
}
