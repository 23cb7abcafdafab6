"""The prompt of a request with `"headrace": {"explain": true}`, and why its prefix was cached or not.

All forms of answers call `prefix_of`; docs/server.md describes the object.

Guard: tests/app/server/test_templates.py.
"""

from msgspec import to_builtins

from headrace.app.answer.call import Call
from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.engine.events import Event, Prefill


def prefix_of(call: Call, event: Event) -> dict[str, object]:
    """Return the `headrace` object of a response: its `prefix` and `prompt`. Empty for other events, or unasked."""
    if not call.explain or not isinstance(event, Prefill) or event.reuse is None:
        return {}
    prompt_tokens = event.total + event.reused + 1  # the last token belongs to the first decode step
    return {
        "prefix": {
            "prompt_tokens": prompt_tokens,
            "reason": reason(event.reuse, prompt_tokens),
            **_figures(event.reuse),
        },
        "prompt": [{"text": text, "control": control} for text, control in event.prompt],
    }


def reason(reuse: PromptReuse, prompt_tokens: int) -> str:
    """Return the reason as one line."""
    cached = f"{reuse.reused} of {prompt_tokens} prompt tokens were cached"
    if reuse.reused >= prompt_tokens - 1:
        return f"{cached}: all but the last, which is always computed"
    if reuse.dropped:
        return f"{cached}; {reuse.dropped} more are those of an earlier request, but were evicted or have no mark"
    if (difference := reuse.difference) is not None:
        here = difference.prompt_token
        there = difference.earlier_token
        return f"{cached}; token {difference.position} is {here!r}, where an earlier request has {there!r}"
    return f"{cached}; no earlier request goes on like this one"


def _figures(reuse: PromptReuse) -> dict[str, object]:
    """Return the figures of the reuse, without tokens prefetched during typing: a server has none."""
    return {name: value for name, value in to_builtins(reuse).items() if name != "prefetched"}
