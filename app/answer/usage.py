"""Token counts and times of answers for result documents, among them OpenAI's `usage` object."""

from collections.abc import Mapping

from headrace.runtime.metrics.telemetry import Percentiles, Summary, in_milliseconds

_OTHER_NAMES: Mapping[str, str] = {
    "decode_steps": "steps",
    "proposed_tokens": "proposed",
    "accepted_tokens": "accepted",
    "achieved_bandwidth_gb_s": "achieved_gb_s",
    "itl_ms": "itl",
    "step_ms": "step_latency",
}
"""Names in documents of figures that `Summary` names otherwise."""


def token_counts(prompt: int, completion: int) -> dict[str, int]:
    """Return the numbers of tokens of prompt and completion, and their sum."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def openai_usage(prompt: int, completion: int, cached: int) -> dict[str, object]:
    """Return OpenAI's `usage` object. cached: prompt tokens that were in the cache."""
    return {**token_counts(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def named_figures(summary: Summary, *names: str) -> dict[str, object]:
    """Return an answer's figures by their names in documents, which all documents share."""
    return {name: _figure(getattr(summary, _OTHER_NAMES.get(name, name)), name) for name in names}


def _figure(value: object, name: str) -> object:
    return in_milliseconds(value) if isinstance(value, Percentiles | None) and name.endswith("_ms") else value
