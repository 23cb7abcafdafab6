"""Token counts and times of a request's answers, as OpenAI's `usage` object and our `timings`."""

from collections.abc import Sequence
from typing import Any

from headrace.runtime.metrics.telemetry import Summary, in_milliseconds


def openai_usage(summaries: Sequence[Summary], thinking_tokens: int = 0) -> dict[str, Any]:
    """Return the `usage` of all choices of one request. The prompt of several choices counts once."""
    prompt = max((summary.prompt_tokens for summary in summaries), default=0)
    completion = sum(summary.completion_tokens for summary in summaries)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(summaries)},
        "completion_tokens_details": {"reasoning_tokens": thinking_tokens},
    }
    if summaries:
        usage["timings"] = timings(summaries[0])
    return usage


def cached_tokens(summaries: Sequence[Summary]) -> int:
    """Return the prompt tokens of the first choice that were in the cache."""
    return summaries[0].reused_tokens if summaries else 0


def timings(summary: Summary) -> dict[str, Any]:
    """Return an answer's times and speeds, under the names of `run --json`."""
    return {
        "queue_s": summary.queue_s,
        "tokenize_s": summary.tokenize_s,
        "prefill_s": summary.prefill_s,
        "ttft_s": summary.ttft_s,
        "prefill_tokens_per_second": summary.prefill_tokens_per_second,
        "decode_tokens_per_second": summary.decode_tokens_per_second,
        "itl_ms": in_milliseconds(summary.itl),
        "decode_steps": summary.steps,
        "proposed_tokens": summary.proposed,
        "accepted_tokens": summary.accepted,
        "achieved_bandwidth_gb_s": summary.achieved_gb_s,
        "mbu": summary.mbu,
    }
