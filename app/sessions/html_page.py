"""A conversation as one HTML page, readable offline: texts, metrics, step charts and token strips.

The page loads nothing and runs nothing: no scripts, no images, and a content security policy that says so. All text is
escaped; Markdown is rendered without HTML. The template is assets/conversation.html, which has the classes of `style`;
`export.page` calls `to_html`.

Guard: tests/app/sessions/test_html_page.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from headrace.app.answer.answer_steps import AnswerSteps, StepText, nearness
from headrace.app.output.markdown_parser import parser
from headrace.app.output.sanitise import safe_line, sanitise
from headrace.app.sessions.records import Message, Session
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.metrics.telemetry import Percentiles
from headrace.runtime.metrics.units import format_seconds

_WIDTH = 720  # of a chart, in its own units
_HEIGHT = 96
_HEADROOM = 1.25  # the chart reaches this far above p99
_SPEEDS = ("usual", "slow", "slowest")  # classes of the page, by `nearness` to the usual latency

StepsOf = Callable[[Message], AnswerSteps | None]
Made = Callable[[Message], list[str]]


class Bar(Struct, frozen=True):
    """One step, or several where there are more than fit: the slowest of them.

    x, y, width, height: in units of the chart, from its upper left corner.
    style: classes of the page.
    title: shown under the mouse.
    """

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str


class Chart(Struct, frozen=True):
    """Step latencies.

    bars: from the first step to the last.
    lines: (name, y, label) of percentiles.
    steps: number of the answer's steps.
    top: latency at the upper edge.
    width, height: in units of the chart.
    """

    bars: list[Bar]
    lines: list[tuple[str, float, str]]
    steps: int
    top: str
    width: int = _WIDTH
    height: int = _HEIGHT


class TokenMark(Struct, frozen=True):
    """One token of a strip. style: classes of the page."""

    text: str
    style: str
    title: str


def to_html(session: Session, branch: Sequence[Message], steps_of: StepsOf, *, facts: str, made: Made) -> str:
    """Return the page of a branch.

    session: with the title.
    branch: its messages in order.
    steps_of: returns the steps of an answer, for its latencies.
    facts: a line on the session.
    made: returns facts of an answer, safe to print.
    """
    pages = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    messages = [_message(message, steps_of, made) for message in branch]
    title = safe_line(session.title) or "Untitled"
    return pages.get_template("conversation.html").render(
        title=title, facts=facts, system=sanitise(session.system), messages=messages
    )


def _message(message: Message, steps_of: StepsOf, made: Made) -> dict[str, object]:
    text = message.by_kind
    entry = {
        "role": message.role,
        "attachments": [safe_line(attachment.name) for attachment in message.attachments],
        "thinking": _rendered(text.thinking or ""),
        "body": None,
        "text": sanitise(text.content),
        "unfinished": "",
        "facts": made(message),
        "chart": None,
        "strip": [],
    }
    if message.partial:
        entry["unfinished"] = message.finish_reason or "interrupted"
    if message.role == "assistant":
        entry["body"] = _rendered(text.content)
        steps = steps_of(message)
        if steps is not None and steps.latencies_s:
            entry["chart"] = step_chart(steps)
            entry["strip"] = list(strip(steps))
    return entry


def _rendered(text: str) -> object:
    """Return Markdown as HTML that needs no escaping; "" for blank text."""
    return Markup(parser().render(sanitise(text))) if text.strip() else ""


def step_chart(steps: AnswerSteps) -> Chart:
    """Return the chart of an answer's step latencies, at least one. The first, not between tokens, is left out."""
    latencies = steps.latencies_s[1:] or steps.latencies_s
    first = len(steps.latencies_s) - len(latencies)
    percentiles = Percentiles.of(latencies)
    assert percentiles is not None
    top = max(percentiles.p99 * _HEADROOM, 1e-9)
    count = min(len(latencies), _WIDTH // 2)
    # With more steps than bars, a bar stands for several and shows the slowest: a mean would hide stalls.
    ends = [round(index * len(latencies) / count) for index in range(count + 1)]
    bars = []
    for index, (start, end) in enumerate(pairwise(ends)):
        slowest = max(range(start, end), key=latencies.__getitem__)
        latency = latencies[slowest]
        text = steps.texts[first + slowest]
        height = max(1.0, min(1.0, latency / top) * _HEIGHT)
        width = _WIDTH / count
        style = _SPEEDS[nearness(latency, percentiles.p50)]
        if text.accepted:
            style += " accepted"
        title = f"step {first + slowest}: {format_seconds(latency)}{_drafted(text)} “{sanitise(text.text)}”"
        bars.append(Bar(index * width, _HEIGHT - height, max(0.5, width * 0.9), height, style, title))
    lines = [
        (name, _HEIGHT - min(1.0, value / top) * _HEIGHT, format_seconds(value))
        for name, value in (("p50", percentiles.p50), ("p95", percentiles.p95))
    ]
    return Chart(bars, lines, len(steps.latencies_s), format_seconds(top))


def strip(steps: AnswerSteps) -> Iterator[TokenMark]:
    """Yield the tokens of an answer in order, rejected draft tokens in front of the token that replaced them."""
    # Seconds per token of each step. The first latency is not between tokens: it is shown, but not judged.
    token_s = [
        latency / max(1, len(text.pieces)) for latency, text in zip(steps.latencies_s, steps.texts, strict=False)
    ]
    usual_s = median(token_s[1:] or token_s or [0.0])
    for index, (pieces, accepted, rejected) in enumerate(steps.texts):
        title = f"step {index}"
        style = "usual"
        if index < len(token_s):
            title += f", {format_seconds(steps.latencies_s[index])}"
            if index:
                style = _SPEEDS[nearness(token_s[index], usual_s)]
        for piece in pieces[:accepted]:
            yield TokenMark(sanitise(piece), "accepted", f"{title}, accepted draft token")
        for draft in rejected:
            yield TokenMark(sanitise(draft), "rejected", f"{title}, rejected draft token")
        for piece in pieces[accepted:]:
            if piece:
                yield TokenMark(sanitise(piece), style, title)


def _drafted(text: StepText) -> str:
    drafts = text.accepted + len(text.rejected)
    if not drafts:
        return ""
    return f", {text.accepted} of {drafts} draft tokens accepted,"
