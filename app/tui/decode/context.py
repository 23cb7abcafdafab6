"""The context: its tokens by origin, the K/V bytes, and the reuse of the next prompt.

After a miss, the first token in which the prompt differs from the cached sequence, and the text around it.

The parts of `origins` sum to the context's tokens, in every phase; tests/tui/decode/test_context.py checks that. A new
part is a name there and in `_LOOKS`.
"""

import os
from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.prompt_reuse import PromptReuse
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, first_that_fits, legend, segments, spread
from headrace.models.text.prefix_difference import PrefixDifference
from headrace.runtime.metrics.units import counted, format_bytes, format_roughly

_NOT_FED = 8  # at most so many tokens at the end of a conversation are fed with the next question
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
_SIDE = 8  # cells of `cached` or `prompt`, the sides of a difference


class ContextSection(Section):
    """Tokens of the conversation by origin, bytes used and allocated, reuse."""

    TITLE = "context"
    NAME = "context"
    MIN_LINES = 6
    MAX_LINES = 11  # two of the frame, six of the context, three about a miss

    def applies(self, metrics: LiveMetrics) -> bool:
        return metrics.context > 0

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        model = metrics.model
        fill = metrics.fill
        if not model.name:  # without a model the bytes are unknown, which 0 would not say
            return [Content.styled("no model yet", "$quiet")]
        of_limit = ""
        if model.context_limit:
            of_limit = f" of {model.context_limit:,}"
        tokens = Content.assemble((f"{metrics.context:,}", "bold"), (f"{of_limit} tokens", "$quiet"))
        token_size = f"{format_bytes(model.kv_bytes_per_token)}/token"
        token_sizes = [token_size]
        if model.kv_format:
            token_sizes.insert(0, f"{token_size} as {model.kv_format}")
        token_text = first_that_fits(token_sizes, width - tokens.cell_length - 1)
        parts = origins(metrics)
        used = f"{format_bytes(fill.used_bytes)} used"
        allocated = f"{format_bytes(fill.allocated_bytes)} held"
        of_bytes = ""
        if model.kv_bytes_at_limit:  # the last block may end past the last token
            of_bytes = f" of {format_bytes(max(model.kv_bytes_at_limit, fill.allocated_bytes))}"
        chosen = _chosen(metrics)
        fill_texts = (f"{used}, {allocated}{of_bytes}{chosen}", f"{allocated}{chosen}", allocated)
        if not chosen:
            fill_texts = (f"{used}, {allocated}{of_bytes}", f"{allocated}{of_bytes}", allocated)
        fill_text = first_that_fits(fill_texts, width)
        lines = [
            spread(tokens, Content.styled(token_text, "$quiet"), width),
            _bar(parts, model.context_limit, width),
            _legend(parts, width),
            *_miss(metrics.reuse, width, height - 6),  # the other lines are six
            _reuse(metrics, width),
            Content.styled(fill_text, "$quiet"),
            _until_full(metrics, width),
        ]
        return [line.truncate(width) for line in lines[:height]]


def _chosen(metrics: LiveMetrics) -> str:
    """Return the tokens that layers with an indexer read of the context; nothing while they read all of it."""
    cost = metrics.model.cost
    if cost is None:
        return ""
    choosing = [layers.visible(metrics.context) for layers in cost.kv if layers.chosen is not None]
    if not choosing or max(choosing) >= metrics.context:
        return ""
    return f"; a step reads {max(choosing):,} tokens"


def origins(metrics: LiveMetrics) -> list[tuple[str, int]]:
    """Return (name, tokens) of the context's parts, which sum to its tokens."""
    remaining = metrics.context
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
    else:  # no prefill of one answer is known, as after a session is opened, or in a turn of several answers
        known = {"cached": metrics.fill.tokens}
    # The counts may exceed the context. The last parts are then cut, so that the sum is right.
    for name, tokens in known.items():
        count = min(remaining, tokens)
        parts.append((name, count))
        remaining -= count
    is_template = remaining <= _NOT_FED and metrics.phase == "idle"  # its tokens after the last message
    parts.append(("template" if is_template else "not cached", remaining))
    return parts


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
    if mark != _NO_BLOCK and not os.environ.get("NO_COLOR"):
        mark = "█"
    return mark, style


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
    if metrics.phase not in ("idle", "decode") or not metrics.context:
        return Content("")
    tokens = min(metrics.fill.tokens, metrics.context)
    text = (f"{tokens:,}", "bold")
    if metrics.context - tokens > _NOT_FED:
        text = (f"{tokens:,} of {metrics.context:,}", "$text-warning")
    line = Content.assemble(("next turn reuses ", "$quiet"), text)
    blocks = metrics.fill.shared_blocks
    if not blocks:
        return line.truncate(width)
    shared = f"{counted(blocks, 'block')} shared"
    shared = first_that_fits((f"{shared} with others", shared), width - line.cell_length - 1)
    return spread(line, Content.styled(shared, "$quiet"), width)


def _miss(reuse: PromptReuse | None, width: int, max_lines: int) -> list[Content]:
    """Return the reason why no more of the prompt was reused, in at most three lines.

    max_lines: below three, the text around the difference is left out.
    """
    if reuse is None:
        return []
    if reuse.dropped:
        tokens = "token was" if reuse.dropped == 1 else "tokens were"
        text = f"{reuse.dropped:,} equal {tokens} dropped from the cache"
        return [Content.styled(text, "$text-warning").truncate(width, ellipsis=True)]
    difference = reuse.difference
    if difference is None:
        return []
    # One line with both tokens, in the longer form if it fits.
    cached = _quoted(difference.earlier_token)
    prompt = _quoted(difference.prompt_token)
    forms = (("miss at token", f"{cached} cached, {prompt} now"), ("miss at", f"{cached} → {prompt}"))
    heads = [Content.assemble((f"{name} {difference.position + 1:,}: ", "$text-warning"), text) for name, text in forms]
    head = next((head for head in heads if head.cell_length <= width), heads[-1].truncate(width, ellipsis=True))
    if max_lines < 3:
        return [head]
    return [head, *_around(difference, width)]


def _around(difference: PrefixDifference, width: int) -> list[Content]:
    """Return the text around the difference of both sides, the differing tokens one above the other.

    cached  the mill [stands] by the river
    prompt  the mill [was] by the river
    """
    before = _visible(difference.before)[-(max(1, width - _SIDE) // 2) :]
    lines = []
    for name, token, text in (
        ("cached", difference.earlier_token, difference.earlier),
        ("prompt", difference.prompt_token, difference.prompt),
    ):
        shown = _visible(text)
        end = len(_visible(token)) if text.startswith(token) else 1  # a token alone may be part of a character
        head = f"{name:<{_SIDE}}{before}"
        line = Content.assemble((head, "$quiet"), (shown[:end], "bold reverse"), shown[end:])
        lines.append(line.truncate(width, ellipsis=True))
    return lines


def _quoted(text: str) -> str:
    """Return a token's text in quotes, on one line."""
    return f"“{_visible(text)}”"


def _visible(text: str) -> str:
    return sanitise(text).replace("\n", "⏎").replace("\t", "⇥")


def _until_full(metrics: LiveMetrics, width: int) -> Content:
    """Return the free tokens of the context and the time until it is full at the current speed."""
    limit = metrics.model.context_limit
    if not limit:
        return Content("")
    if metrics.context >= limit:
        return Content.styled("the context is full", "bold $text-warning")
    tokens = Content.assemble((f"{limit - metrics.context:,}", "bold"), (" more until full", "$quiet"))
    seconds = seconds_until_full(metrics)
    if seconds is None:
        return tokens
    time = Content.styled(f"about {format_roughly(seconds, hour_digits=1)} of decoding", "$quiet")
    return spread(tokens, time, width)


def seconds_until_full(metrics: LiveMetrics) -> float | None:
    """Return the seconds of decoding up to the context limit; None if the speed is unknown."""
    cost = metrics.model.cost
    achieved = metrics.history.token_gb_s
    if cost is None or not achieved:
        return None
    here = metrics.context
    limit = metrics.model.context_limit
    # `achieved` contains the tokens per step, so that bytes of a step / `achieved` is the time of a token.
    mean = (cost.step_bytes(here) + cost.step_bytes(max(here, limit - 1))) / 2  # bytes grow evenly, or hardly at all
    return max(0, limit - here) * mean / (achieved * 1e9)
