"""Token counts, times and ends of answers for result documents, among them OpenAI's `usage` object.

`run --json`, `batch` and the server's endpoints take their times and speeds from here, so each has one name and one
unit. Token counts have OpenAI's names of chat completions; `server.responses` and `server.anthropic` write those of
their APIs. A new field of `timings` needs a row in docs/server.md, which a test compares.

Guards: tests/app/server/test_openai.py and test_page.py.
"""

from collections.abc import Mapping, Sequence

from headrace.runtime.engine.request import Finished
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


def openai_usage(ends: Sequence[Finished], count: int = 1) -> dict[str, object]:
    """Return the `usage` of a request's answers, with the `timings` and the cached tokens of the first.

    ends: the answers to a prompt come one after the other.
    count: number of answers to each prompt.
    """
    summaries = [end.summary for end in ends]
    prompt = sum(summary.prompt_tokens for summary in summaries[::count])  # each prompt counts once
    completion = sum(summary.completion_tokens for summary in summaries)
    usage: dict[str, object] = {
        **token_counts(prompt, completion),
        "prompt_tokens_details": {"cached_tokens": summaries[0].reused_tokens if summaries else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(end.thinking_tokens for end in ends)},
    }
    if summaries:
        usage["timings"] = timings(summaries[0])
    return usage


def finish_reason(end: Finished, calls: Sequence[object]) -> str:
    """Return the reason of an answer's end as OpenAI names it: stop, length, cancelled or tool_calls."""
    return "tool_calls" if calls and end.reason == "stop" else end.reason


def timings(summary: Summary) -> dict[str, object]:
    """Return an answer's times and speeds."""
    return named_figures(
        summary,
        *("queue_s", "tokenize_s", "prefill_s", "ttft_s", "prefill_tokens_per_second", "decode_tokens_per_second"),
        *("itl_ms", "decode_steps", "proposed_tokens", "accepted_tokens", "achieved_bandwidth_gb_s", "mbu"),
    )


def named_figures(summary: Summary, *names: str) -> dict[str, object]:
    """Return an answer's figures by their names in documents, which all documents share.

    names: of fields of `Summary`, or of `_OTHER_NAMES`.
    """
    return {name: _figure(getattr(summary, _OTHER_NAMES.get(name, name)), name) for name in names}


def _figure(value: object, name: str) -> object:
    """Return a figure in the unit that its name ends with. Percentiles are in seconds; None stands for unknown ones."""
    if name.endswith("_ms") and isinstance(value, Percentiles | None):
        return in_milliseconds(value)
    return value
