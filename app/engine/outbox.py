"""Deltas of one answer on their way out of the engine process: the first text at once, later text in batches.

Sending costs CPU time that decoding needs.
"""

import time
from collections.abc import Callable, Sequence

from headrace.app.answer.answer import Answer
from headrace.app.answer.answer_steps import StepText
from headrace.app.engine.events import Delta, Event
from headrace.models.text.events import Completed, TextChunk, TokenReport
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.runtime.metrics.telemetry import StepRecord

TEXT_S = 0.07  # between two deltas; the chat polls less often
SERVED_TEXT_S = 0.03  # of a server, for up to two answers at a time; longer in proportion for more
_RECORDS_S = 0.4  # between two deltas with step records

Send = Callable[[Event], None]


def joined(deltas: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Return one delta a call."""
    texts: dict[tuple[int, str], str] = {}
    for delta in deltas:
        texts[delta.index, delta.name] = texts.get((delta.index, delta.name), "") + delta.text
    return tuple(CallDelta(index, name, text) for (index, name), text in texts.items())


class Outbox:
    """watched: steps are sent, not text alone."""

    def __init__(
        self, generation: int, answer: Answer, send: Callable[[Delta], None], *, thinks: bool, text_s: float = TEXT_S
    ) -> None:
        """generation: id of the request. thinks: the model has thinking sections; otherwise all text is content.

        text_s: seconds between two deltas.
        """
        self._id = generation
        self._answer = answer
        self._thinks = thinks
        self.text_s = text_s
        self.watched = True
        self._tokens: list[TokenReport] = []
        self._calls: Sequence[ToolCall] = ()
        self._call_deltas: list[CallDelta] = []
        self._send = send
        self._opening = answer.prompt.opening  # sent with the first text
        self._text: list[str] = []
        self._thinking = ""
        self._content = ""
        self._steps: list[StepText] = []
        self._records: list[StepRecord] = []
        self._sent = self._records_sent = float("-inf")
        self._has_output = False

    def add(self, part: TextChunk | Completed) -> None:
        """Add a step, or the end of the answer, and send if it is time."""
        now = time.monotonic()
        text = part.text
        if isinstance(part, TextChunk):
            record: StepRecord | None = part.step.record
            step = StepText(part.pieces, part.step.record.accepted, part.rejected)
            self._tokens.extend(part.reports)
        else:
            record = part.finished.stop_record
            step = StepText((text,))
        self._call_deltas.extend(part.call_deltas)
        if record is not None:
            self._records.append(record)
        if (text or record is not None) and self.watched:
            self._steps.append(step)
        if text:
            self._text.append(self._opening + text)
            self._opening = ""
        if self._thinks:
            self._thinking += part.thinking
            self._content += part.content
        else:
            self._content += text
        if (text or part.calls or part.call_deltas) and not self._has_output:  # the first output leaves at once
            self._has_output = True
            self._sent = float("-inf")
        if part.calls:  # behind the text so far, and before what follows
            self._calls = part.calls
            self._flush(with_records=False)
        if now - self._sent >= self.text_s:
            self._flush(with_records=now - self._records_sent >= _RECORDS_S)

    def flush(self) -> None:
        """Send everything."""
        self._flush(with_records=True)

    def _flush(self, *, with_records: bool) -> None:
        records: list[StepRecord] = []
        if with_records:
            records, self._records = self._records, records
        has_text = self._text or self._thinking or self._content  # half a tag comes in `text` first
        if has_text or records or self._tokens or self._calls or self._call_deltas:
            delta = Delta(
                self._id,
                "".join(self._text),
                records if self.watched else (),
                self._answer.first_output_s,
                steps=self._steps,
                tokens=self._tokens,
                calls=self._calls,
                call_deltas=joined(self._call_deltas),
                itl_s=[latency for record in records for latency in record.itl_s],
                thinking=self._thinking,
                content=self._content,
            )
            self._send(delta)
            self._text = []
            self._thinking = ""
            self._content = ""
            self._steps = []
            self._tokens = []
            self._calls = ()
            self._call_deltas = []
        self._sent = time.monotonic()
        if records:
            self._records_sent = self._sent
