"""Token counts and times of a request's answers, as OpenAI's `usage` object and our `timings`."""

from collections.abc import Sequence

from headrace.app.answer.usage import openai_usage
from headrace.runtime.metrics.telemetry import Summary, in_milliseconds


def request_usage(
    summaries: Sequence[Summary], thinking_tokens: int = 0, prompt_tokens: int | None = None
) -> dict[str, object]:
    """Return the `usage` of all choices of one request, with the `timings` of the first.

    prompt_tokens: of all prompts; None: the choices have one prompt, which counts once.
    """
    if prompt_tokens is None:
        prompt_tokens = max((summary.prompt_tokens for summary in summaries), default=0)
    completion = sum(summary.completion_tokens for summary in summaries)
    cached = summaries[0].reused_tokens if summaries else 0
    return {
        **openai_usage(prompt_tokens, completion, cached),
        "completion_tokens_details": {"reasoning_tokens": thinking_tokens},
        **({"timings": timings(summaries[0])} if summaries else {}),
    }


def timings(summary: Summary) -> dict[str, object]:
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
