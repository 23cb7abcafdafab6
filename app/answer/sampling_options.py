"""Sampling settings of the chat as dictionaries, from `app.answer.options`."""

from collections.abc import Mapping
from typing import Any

from headrace.app.answer.options import CHAT_DEFAULTS, AnswerOptions, recommended_options

CHAT_SAMPLING: Mapping[str, float] = CHAT_DEFAULTS.given()


def sampling_settings(
    given: Mapping[str, Any], recommended: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return keyword arguments for SamplingParams: `given` options, then the model's, then `otherwise`."""
    defaults = None if otherwise is None else AnswerOptions.of(otherwise)
    return AnswerOptions.of(given).resolved(recommended, defaults).given()


def chat_sampling(given: Mapping[str, Any], recommended: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for an answer in the chat."""
    return AnswerOptions.of(given).resolved(recommended, CHAT_DEFAULTS).stored()


def recommended_settings(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a generation_config.json recommends."""
    return recommended_options(recommended).given()
