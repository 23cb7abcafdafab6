"""Export of a session: Markdown or HTML of the active branch, or JSON of all branches.

/export and `headrace sessions export` write it. Messages are Markdown by anybody: headings, HTML, open code blocks and
definitions of links in a message must not change the document around it, and its images must not be fetched when the
document is shown (`markdown_part`).

Guards: tests/app/sessions/test_export_path.py and test_markdown_part.py.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from headrace.app.answer.phrases import sampling_text, summary_phrases
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.config.files import replace_file
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.telemetry import Summary

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

FORMS = {"md": "markdown", "html": "html", "json": "json"}
"""Forms of an export by the ending of its file's name; others are Markdown."""
_SPEAKERS = {"user": "You", "assistant": "Answer"}
_LOWER = 2  # levels: `#` and `##` belong to the document
_LOWEST = 6  # level of Markdown's smallest heading
# The beginning of a tag, `<b>`, `</b>`, `<!-- -->`; but no address in angle brackets, `<https://example.org>`.
_TAG = re.compile(r"<(?=[A-Za-z/!?])(?!https?://[^\s<>]*>)")
# The beginning of an image, `![`, after an even number of backslashes: an odd number escapes it.
_IMAGE = re.compile(r"(?<!\\)((?:\\\\)*)!(?=\[)")
# `====` or `----` below a line makes it a heading, also within a quotation: `> ----`.
_UNDERLINE = re.compile(r"^([ \t>]*)((?:=+|-+)[ \t]*)$")
# Code within a line, `x` or ``a ` b``: as many backquotes at its end as at its beginning, none of them escaped.
_CODE = re.compile(r"((?<![`\\])(`+)(?!`).*?(?<!`)\2(?!`))", re.DOTALL)


def export_path(session_id: str, name: str) -> Path:
    """Return the path `name`. For "" and a form alone (html, json, md), the path is named after the session.

    Only the latter may be overwritten. Raises UsageError.
    """
    may_replace = False
    if name in FORMS or not name:
        name = f"headrace-{session_id}.{name or 'md'}"
        may_replace = True
    try:
        path = Path(name).expanduser()
        has_folder = path.parent.is_dir()
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror}") from None
    except RuntimeError:
        raise UsageError(f"{name} cannot be written: nobody has that home") from None
    if not may_replace and os.path.lexists(path) and path != Path(f"headrace-{session_id}{path.suffix}"):
        raise UsageError(f"{path} exists already", "another name, or none, writes another file")
    if not has_folder:
        raise UsageError(
            f"{path} cannot be written: {path.parent} is no folder", "create it first, or name another file"
        )
    return path


def write_export(store: SessionStore, session_id: str, name: str) -> Path:
    """Write a session to the file of `export_path` and return its path. Raises UsageError."""
    path = export_path(session_id, name)
    try:
        replace_file(path, exported(store, session_id, path))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    return path


def exported(store: SessionStore, session_id: str, path: Path) -> str:
    """Return the content of the file: for .json all branches, else the active one as HTML or Markdown."""
    form = FORMS.get(path.suffix.removeprefix("."), "markdown")
    if form == "json":
        document = to_document(store.session(session_id), store.messages(session_id))
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return page(store, session_id, form)


def page(store: SessionStore, session_id: str, form: str) -> str:
    """Return the active branch. form: `html`, else Markdown."""
    session = store.session(session_id)
    branch = store.branch(session_id)
    if form != "html":
        return to_markdown(session, branch)
    from headrace.app.sessions.html_page import to_html

    return to_html(session, branch, store.steps, facts=_facts(session), made=_made)


def to_markdown(session: Session, branch: Sequence[Message]) -> str:
    """Return a branch as Markdown, safe to print, with folded thinking and metrics per answer.

    No text of a message can pass for another message or for HTML, define links of others, or load an image.
    """
    parts = [f"# {_line(session.title) or 'Untitled'}", f"*{markdown_line(_facts(session))}*"]
    if session.system:
        parts.append(f"**System prompt**\n\n{_part(session.system)}")
    for message in branch:
        parts.append(f"## {_SPEAKERS[message.role]}")
        parts += [f"*Attached: {_line(attachment.name)}*" for attachment in message.attachments]
        text = message.by_kind
        if text.thinking:
            parts.append(f"<details><summary>Thinking</summary>\n\n{_part(text.thinking)}\n\n</details>")
        if text.content.strip():
            parts.append(_part(text.content))
        if message.partial:
            parts.append(f"*Not complete: {message.finish_reason or 'interrupted'}.*")
        if message.system and message.system != session.system:
            parts.append(f"**System prompt of this answer**\n\n{_part(message.system)}")
        if facts := _made(message):
            parts.append(f"<sub>{markdown_line(' · '.join(facts))}</sub>")
    return "\n\n".join(parts) + "\n"


def to_document(session: Session, messages: Sequence[Message]) -> dict[str, object]:
    """Return all branches as a flat list with `parent_id`s. Times are seconds since the epoch."""
    return {"session": to_builtins(session), "messages": [_message_document(message) for message in messages]}


def _message_document(message: Message) -> dict[str, object]:
    document: dict[str, object] = to_builtins(message)
    if message.metrics is not None:
        document["metrics"] = message.metrics.document()
    del document["kinds"]  # `content` has the tags
    return document


def made_with(message: Message) -> list[str]:
    """Return the stored model and sampling of a message, safe to print."""
    facts = []
    if message.model and message.role == "assistant":
        facts.append(sanitise(message.model))
    if message.sampling is not None:
        facts.append(sampling_text(message.sampling))
    return facts


def metrics_line(metrics: Summary) -> str:
    """Return an answer's metrics in one line."""
    known = summary_phrases(metrics)
    return " · ".join([*known, f"prompt {metrics.prompt_tokens} ({metrics.reused_tokens} cached)"])


def _made(message: Message) -> list[str]:
    """Return the facts of an answer: model, sampling, metrics."""
    facts = made_with(message)
    if message.metrics is not None:
        facts.append(metrics_line(message.metrics))
    return facts


def _facts(session: Session) -> str:
    facts = f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(session.created_at))}, session {session.id}"
    if session.model:
        facts += f", {sanitise(session.model)}"
    return facts


def _part(text: str) -> str:
    return markdown_part(sanitise(text).strip())


def _line(text: str) -> str:
    return markdown_line(sanitise(text))


def markdown_part(text: str) -> str:
    """Return Markdown that stays within its part of a document."""
    lines = _without_unsafe(_without_underlines(text.split("\n")))
    tokens = _parser().parse("\n".join(lines))
    for token in tokens:
        if token.type == "heading_open" and token.map is not None:
            _lower(lines, token)
    if tokens and tokens[-1].type == "fence":
        last = _parser().parse("\n".join([*lines, "", "x"]))[-1]
        if last.type == "fence":  # still open: it takes the text after it in
            lines.append(last.markup)
    return "\n".join(lines)


def markdown_line(text: str) -> str:
    """Return text for one line of Markdown, without HTML and images."""
    return _escape(" ".join(text.split()))


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"inline_definitions": True})  # tokens for definitions of links, `[name]: address`


def _lower(lines: list[str], heading: "Token") -> None:
    """Lower a heading by two levels."""
    assert heading.map is not None
    level = min(len(heading.markup) + _LOWER, _LOWEST)
    lines[heading.map[0]] = lines[heading.map[0]].replace(heading.markup, "#" * level, 1)


def _without_underlines(lines: Sequence[str]) -> list[str]:
    """Escape the lines that make a heading of the line above."""
    changed = list(lines)
    for start, end in _plain_runs(lines):
        for index in range(max(start, 1), end):
            if lines[index - 1].strip():
                changed[index] = _UNDERLINE.sub(r"\1\\\2", lines[index])
    return changed


def _without_unsafe(lines: Sequence[str]) -> list[str]:
    """Escape HTML, images, and definitions of links, which count in the whole document."""
    while True:  # an escape can uncover another definition: `[a]: <b` is none, `[a]: &lt;b` is one
        changed = _without_html(lines)
        tokens = _parser().parse("\n".join(changed))
        first_lines = [token.map[0] for token in tokens if token.type == "definition" and token.map is not None]
        if not first_lines:
            return changed
        for index in first_lines:
            changed[index] = changed[index].replace("[", "\\[", 1)
        lines = changed


def _without_html(lines: Sequence[str]) -> list[str]:
    """Escape tags and images outside of code; inside of possible code, too, if a parser still finds one."""
    for in_code in (_escape_around_code, _escape):
        changed = list(lines)
        for start, end in _plain_runs(lines):
            changed[start:end] = in_code("\n".join(lines[start:end])).split("\n")
        if not _has_unsafe(_parser().parse("\n".join(changed))):
            break
    return changed


def _plain_runs(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the runs of lines that are in no code block."""
    start = 0
    for token in _parser().parse("\n".join(_escape(line) for line in lines)):
        if token.type in ("fence", "code_block") and token.map is not None:
            if start < token.map[0]:
                yield start, token.map[0]
            start = token.map[1]
    if start < len(lines):
        yield start, len(lines)


def _escape(text: str) -> str:
    """Escape tags, and the marks of images: the image becomes a link after an exclamation mark."""
    return _IMAGE.sub(r"\1\!", _TAG.sub("&lt;", text))


def _escape_around_code(text: str) -> str:
    parts = _CODE.split(text)  # text, code, its backticks, text, ...
    parts[::3] = map(_escape, parts[::3])
    del parts[2::3]  # the code has them, too
    return "".join(parts)


def _has_unsafe(tokens: Sequence["Token"]) -> bool:
    """Return whether HTML or an image is among the tokens."""
    for token in tokens:
        if token.type.startswith("html_") or token.type == "image" or _has_unsafe(token.children or ()):
            return True
    return False
