"""The context: its tokens by origin, the K/V bytes, and the reuse of the next prompt.

After a miss, the first token in which the prompt differs from the cached sequence, and the text around it.
"""

import os
from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, legend, segments, spread
from headrace.models.text.prefix_difference import PrefixDifference
from headrace.runtime.metrics.units import counted, format_bytes, format_roughly

_NOT_FED = 8  # tokens at the end of a conversation that are fed with the next question
_NO_BLOCK = "·"
_LOOKS = {  # character of each part without colours, and style
    "cached": ("█", "$primary"),
    "prefetched": ("▓", "$secondary"),
    "new": ("▒", "$warning"),
    "output": ("░", "$success"),
    "template": (_NO_BLOCK, "$foreground 60%"),
    "not cached": (_NO_BLOCK, "$foreground 60%"),
}

_SHORT = {"prefetched": "pre", "output": "out", "not cached": "rest"}


class ContextSection(Section):
    """Tokens of the conversation by origin, bytes used and allocated, reuse."""

    TITLE = "context"
    NAME = "context"
    LEAST = 6
    MOST = 11

    def applies(self, metrics: LiveMetrics) -> bool:
        return metrics.context > 0

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        model = metrics.model
        fill = metrics.fill
        if not model.name:  # zero bytes would be a figure
            return [Content.styled("no model yet", "$quiet")]
        tokens = Content.assemble(
            (f"{metrics.context:,}", "bold"),
            (f" of {model.context_limit:,} tokens" if model.context_limit else " tokens", "$quiet"),
        )
        size = f"{format_bytes(model.kv_bytes_per_token)}/token"
        named = f"{size} as {model.kv_format}" if model.kv_format else size
        each = Content.styled(named if tokens.cell_length + len(named) < width else size, "$quiet")
        parts = origins(metrics)
        limit = max(model.kv_bytes_at_limit, fill.allocated_bytes)  # the last block may end past the last token
        used = f"{format_bytes(fill.used_bytes)} used"
        allocated = f"{format_bytes(fill.allocated_bytes)} held"
        of = f" of {format_bytes(limit)}" if model.kv_bytes_at_limit else ""
        forms = (f"{used}, {allocated}{of}", f"{allocated}{of}", allocated)
        fill_text = next((form for form in forms if len(form) <= width), allocated)
        lines = [
            spread(tokens, each, width),
            _bar(parts, model.context_limit, width),
            _legend(parts, width),
            *_miss(metrics.reuse, width, height - 6),
            _reuse(metrics, width),
            Content.styled(fill_text, "$quiet"),
            _until_full(metrics, width),
        ]
        return [line.truncate(width) for line in lines[:height]]


def origins(metrics: LiveMetrics) -> list[tuple[str, int]]:
    """Return (name, tokens) of the context's parts, which sum to its tokens."""
    left = metrics.context
    parts = []
    answer = metrics.answer
    computed = answer.prefill_done + bool(answer.records)  # the first step feeds the prompt's last token
    if answer.reused or computed:
        prefetched = min(metrics.prefetched, answer.reused)
        known = {
            "cached": answer.reused - prefetched,
            "prefetched": prefetched,
            "new": computed,
            "output": answer.tokens,
        }
    else:  # nothing was asked since the session was opened
        known = {"cached": metrics.fill.tokens}
    for name, tokens in known.items():
        parts.append((name, min(left, tokens)))
        left -= parts[-1][1]
    around = left <= _NOT_FED and metrics.phase == "idle"  # tokens of the template after the last message
    return [*parts, ("template" if around else "not cached", left)]


def _bar(parts: Sequence[tuple[str, int]], limit: int, width: int) -> Content:
    """Return a bar of `width` cells, full at the limit; each part that exists has a cell, if there are enough.

    limit: tokens; 0 if unknown: the parts fill the bar.
    """
    pieces = [(tokens, *_look(name)) for name, tokens in parts if tokens]
    total = sum(tokens for _, tokens in parts)
    share = total / max(limit, total, 1)
    filled = min(width, max(len(pieces), round(share * width)))
    return Content.assemble(segments(pieces, filled), ("─" * (width - filled), "$foreground 20%"))


def _look(name: str) -> tuple[str, str]:
    """Return the character and the style of a part. Colours tell solid parts apart."""
    mark, style = _LOOKS[name]
    return mark if mark == _NO_BLOCK or os.environ.get("NO_COLOR") else "█", style


def _legend(parts: Sequence[tuple[str, int]], width: int) -> Content:
    """Return the parts with their tokens in the order of the bar: in short names where long ones do not fit.

    Where short ones do not fit either: the largest parts, then the sum of the others.
    """
    shown = [part for part in parts if part[1]]
    if not shown:
        return Content.styled("empty", "$faint")
    pieces = [_named(name, tokens, f" {name}") for name, tokens in shown]
    line = Content("  ").join(pieces)
    if line.cell_length <= width:
        return line
    short = [_named(name, tokens, _SHORT.get(name, name)) for name, tokens in shown]
    line = Content(" ").join(short)
    if line.cell_length <= width:
        return line
    shown.sort(key=lambda part: -part[1])

    def rest(count: int) -> Content:
        total = sum(tokens for _, tokens in shown[count:])
        return Content.assemble((f"+ {len(shown) - count} more ", "$quiet"), (f"{total:,}", "bold"))

    largest = [_named(name, tokens, _SHORT.get(name, name)) for name, tokens in shown]
    return legend(largest, rest, width, max_lines=1, gap=1)[0]


def _named(name: str, tokens: int, label: str) -> Content:
    """Return a part of the legend: its mark, its label and its tokens."""
    return Content.assemble(_look(name), (f"{label} ", "$quiet"), (f"{tokens:,}", "bold"))


def _reuse(metrics: LiveMetrics, width: int) -> Content:
    """Return how much of the conversation the next turn will find in the cache, and the blocks that others share."""
    blocks = metrics.fill.shared_blocks
    if metrics.phase not in ("idle", "decode") or not metrics.context:
        return Content("")
    tokens = min(metrics.fill.tokens, metrics.context)
    whole = metrics.context - tokens <= _NOT_FED
    of = "" if whole else f" of {metrics.context:,}"
    line = Content.assemble(("next turn reuses ", "$quiet"), (f"{tokens:,}{of}", "bold" if whole else "$text-warning"))
    shared = f"{counted(blocks, 'block')} shared"
    forms = [form for form in (f"{shared} with others", shared) if line.cell_length + len(form) < width]
    return spread(line, Content.styled(forms[0] if blocks and forms else "", "$quiet"), width)


def _miss(reuse: PromptReuse | None, width: int, max_lines: int) -> list[Content]:
    """Return the reason why no more of the prompt was reused, in at most three lines."""
    if reuse is None:
        return []
    if reuse.dropped:
        tokens = "token was" if reuse.dropped == 1 else "tokens were"
        text = f"{reuse.dropped:,} equal {tokens} dropped from the cache"
        return [Content.styled(text, "$text-warning").truncate(width, ellipsis=True)]
    if (difference := reuse.difference) is None:
        return []
    cached = _quoted(difference.earlier_token)
    prompt = _quoted(difference.prompt_token)
    forms = (("miss at token", f"{cached} cached, {prompt} now"), ("miss at", f"{cached} → {prompt}"))
    heads = [Content.assemble((f"{name} {difference.position + 1:,}: ", "$text-warning"), text) for name, text in forms]
    head = next((head for head in heads if head.cell_length <= width), heads[-1].truncate(width, ellipsis=True))
    return [head, *_around(difference, width)] if max_lines >= 3 else [head]


def _around(difference: PrefixDifference, width: int) -> list[Content]:
    """Return the text around the difference of both sides, the differing tokens one above the other."""
    label = 8
    room = max(1, width - 8)
    before = _visible(difference.before)[-(room // 2) :]
    lines = []
    for name, token, text in (
        ("cached", difference.earlier_token, difference.earlier),
        ("prompt", difference.prompt_token, difference.prompt),
    ):
        shown = _visible(text)
        first = len(_visible(token)) if text.startswith(token) else 1
        line = Content.assemble(
            (f"{name:<{label}}", "$quiet"), (before, "$quiet"), (shown[:first], "bold reverse"), shown[first:]
        )
        lines.append(line.truncate(width, ellipsis=True))
    return lines


def _quoted(text: str) -> str:
    return f"“{_visible(text)}”"


def _visible(text: str) -> str:
    return sanitise(text).replace("\n", "⏎").replace("\t", "⇥")


def _until_full(metrics: LiveMetrics, width: int) -> Content:
    """Return the free tokens of the context and the time until it is full at the current speed."""
    left = metrics.model.context_limit - metrics.context
    if not metrics.model.context_limit or left <= 0:
        return Content.styled("the context is full" if metrics.model.context_limit else "", "bold $text-warning")
    tokens = Content.assemble((f"{left:,}", "bold"), (" more until full", "$quiet"))
    seconds = seconds_until_full(metrics)
    time = Content.styled(
        f"about {format_roughly(seconds, hour_digits=1)} of decoding" if seconds is not None else "", "$quiet"
    )
    return spread(tokens, time, width)


def seconds_until_full(metrics: LiveMetrics) -> float | None:
    """Return the seconds of decoding up to the context limit; None if the speed is unknown."""
    cost = metrics.model.cost
    achieved = metrics.history.token_gb_s
    if cost is None or not achieved:
        return None
    here = metrics.context
    limit = metrics.model.context_limit
    mean = (cost.step_bytes(here) + cost.step_bytes(max(here, limit - 1))) / 2  # bytes grow evenly, or hardly at all
    return max(0, limit - here) * mean / (achieved * 1e9)
