"""Full-text search over the messages of all sessions and branches.

All words must occur as beginnings of words; accents and case are ignored, by the tokenizer of `message_index` in
`database.py`. If the index finds nothing, the text is searched as a substring: the index does not split scripts written
without spaces. The screen of sessions and `headrace sessions` call `search`; the transcript scrolls to `best_line`.

Guards: tests/app/sessions/test_store.py.
"""

import re
import sqlite3
import unicodedata
from collections.abc import Sequence

from headrace.app.sessions.records import Hit
from headrace.app.sessions.rows import message_of, readable, session_of
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import SessionError

_WORD = re.compile(r"\w+")  # "don't panic" has three: don, t, panic
_LONGEST = 1000  # characters; SQLite limits patterns
_AROUND = 40  # characters around a match, in an excerpt of a substring
_EXCERPT_TOKENS = 16  # words of an excerpt from the index, matches included
_COLUMNS = "messages.id AS id, session_id, title, role, messages.created_at AS created_at"


def search(store: SessionStore, text: str, limit: int = 50) -> list[Hit]:
    """Return the messages with all words of `text`, newest first. Raises SessionError."""
    if len(text) > _LONGEST:
        raise SessionError(f"what is searched for is {len(text)} characters long (limit {_LONGEST})")
    words = _WORD.findall(text)
    rows: list[sqlite3.Row] = []
    if words:
        # Quoted: no operators of the query language.
        rows = store.db.rows(
            f"SELECT {_COLUMNS}, snippet(message_index, 0, '«', '»', ' … ', {_EXCERPT_TOKENS}) AS snippet"
            " FROM message_index"
            " JOIN messages ON messages.id = message_index.rowid JOIN sessions ON sessions.id = session_id"
            " WHERE message_index MATCH ? ORDER BY messages.id DESC LIMIT ?",
            *(" ".join(f'"{word}"*' for word in words), limit),
        )
    if rows or not text.strip():
        return [_hit(row, readable(row["snippet"])) for row in rows]
    pattern = re.sub(r"([%_\\])", r"\\\1", text.strip())  # 50% -> 50\%: LIKE would take it for any text
    rows = store.db.rows(
        f"SELECT {_COLUMNS}, content FROM messages JOIN sessions ON sessions.id = session_id"
        r" WHERE content LIKE ? ESCAPE '\' ORDER BY messages.id DESC LIMIT ?",
        *(f"%{pattern}%", limit),
    )
    return [_hit(row, _excerpt(readable(row["content"]), text.strip())) for row in rows]


def best_line(lines: Sequence[str], text: str) -> int | None:
    """Return the index of the first line with most words of `text`; None if no line has any."""
    wanted = set(_WORD.findall(_folded(text)))
    counts = [_words_begun(line, wanted) for line in lines]
    whole = text.strip().casefold()
    if whole and not any(counts):
        counts = [int(whole in line.casefold()) for line in lines]
    max_count = max(counts, default=0)
    if not max_count:
        return None
    return counts.index(max_count)


def _words_begun(line: str, starts: set[str]) -> int:
    words = _WORD.findall(_folded(line))
    return sum(any(word.startswith(start) for word in words) for start in starts)


def _folded(text: str) -> str:
    """Return text without accents and case."""
    return "".join(c for c in unicodedata.normalize("NFD", text.casefold()) if not unicodedata.combining(c))


def _hit(row: sqlite3.Row, snippet: str) -> Hit:
    session = session_of(row)
    message = message_of(row)
    return Hit(
        message.session_id, session.title, message.id, message.role, message.created_at, " ".join(snippet.split())
    )


def _excerpt(content: str, text: str) -> str:
    start = max(content.lower().find(text.lower()), 0)
    end = start + len(text)
    before = content[max(0, start - _AROUND) : start]
    after = content[end : end + _AROUND]
    if start > _AROUND:
        before = f"… {before}"
    if len(content) > end + _AROUND:
        after = f"{after} …"
    return f"{before}«{content[start:end]}»{after}"
