"""Stand-ins among the messages: for an answer without text, and for the messages left out of the context.

The latter is a mark between them and those that are sent, with the summary of the former. `ShownBranch` and
`AnswerPane` insert stand-ins, `Entry` draws the mark by `mark_lines`, and actions on a message look for its id
(`ChatActions.act`). Stored messages have positive ids.

Guard: tests/tui/test_summary.py.
"""

from textual.content import Content

from headrace.app.sessions.records import Message

MARK = -2  # id of the mark
_PENDING = -1  # id of the stand-in for an answer without text
Lines = list[tuple[Content, bool]]
"""Lines, each with True for the head that folds the summary."""


def pending_answer(session_id: str = "") -> Message:
    """Return the stand-in for an answer that has no text yet."""
    return Message(_PENDING, session_id, None, "assistant", "", created_at=0.0, partial=True)


def mark_message(session_id: str, summary: str) -> Message:
    """Return the placeholder message with the summary, "" if there is none."""
    return Message(id=MARK, session_id=session_id, parent_id=None, role="assistant", content=summary, created_at=0.0)


def mark_lines(text: list[Content], words: int, left_out: int, width: int, *, unfolded: bool) -> Lines:
    """Return the mark's lines, each with True for the head that folds it.

    text: the summary, laid out for `width` - 2 cells; empty without one.
    words: number of its words.
    left_out: number of messages above.
    width: cells of a line.
    unfolded: the summary shows.
    """
    above = "the message above"
    verb = "is"
    if left_out > 1:
        above = f"the {left_out} messages above"
        verb = "are"
    if not text:
        alone = f"─── {above} {verb} not sent · /summary undo sends all"
        return [(Content.styled(alone, "$text-warning").truncate(width, ellipsis=True), False)]
    head = Content.assemble(
        (f"{'▾' if unfolded else '▸'} summary, sent in place of {above}", "$text-warning"),
        (f" {words} words", "$quiet"),
    )
    lines: Lines = [(head.truncate(width, ellipsis=True), True)]
    if unfolded:
        lines += [(Content.assemble(("┊ ", "$text-warning"), line), False) for line in text]
        hint = "/summary edits it · /summary undo sends all"
        lines.append((Content.styled(hint, "$quiet").truncate(width, ellipsis=True), False))
    return lines
