"""Token counts and times of a request's answers, as OpenAI's `usage` object and our `timings`."""

from collections.abc import Sequence

from headrace.app.answer.usage import named_figures, openai_usage
from headrace.runtime.metrics.telemetry import Summary


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
    """Return an answer's times and speeds."""
    return named_figures(
        summary,
        *("queue_s", "tokenize_s", "prefill_s", "ttft_s", "prefill_tokens_per_second", "decode_tokens_per_second"),
        *("itl_ms", "decode_steps", "proposed_tokens", "accepted_tokens", "achieved_bandwidth_gb_s", "mbu"),
    )
