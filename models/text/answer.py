"""Answers as text: a request's tokens through the detokenizer and the stop strings.

The text is the model's, unsanitised: sanitise it before printing (`app.output.sanitise`).

Guard: tests/models/text/test_answer.py.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.models.text.events import Completed, TextChunk, TokenReport
from headrace.models.text.stop_strings import StopMatcher
from headrace.models.text.thinking import ThinkingSplitter
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import CallDelta, ToolCall
from headrace.models.text.tools.stream import ToolStream
from headrace.runtime.engine.request import Finished, Request, Step


class AnswerText:
    """Conversion of one request's events to text. A stop string ends it with reason `stop` and is left out.

    The text of an answer that was cut ends before a character that is incomplete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        stops: Sequence[str] = (),
        tools: ToolStream | None = None,
        *,
        thinks: bool = False,
        has_kinds: bool = True,
    ) -> None:
        """Raises UsageError for an empty stop string.

        tools: separates calls from text.
        thinks: the prompt has begun a thinking section, in which no stop string counts.
        has_kinds: thinking is told apart from content; else all text is content.
        """
        self._request = request
        self._tokenizer = tokenizer
        self._tools = tools
        self._detokenizer = tokenizer.answer_stream(None if tools is None else tools.marks, thinks=thinks)
        self._matcher = StopMatcher(stops)
        self._has_stops = len(stops) > 0
        self._splitter = ThinkingSplitter(thinks=thinks)
        self._has_kinds = has_kinds
        self._counts_section = has_kinds or thinks  # else a section is content like any other
        self._count = 0  # tokens of the answer
        self._section_count = 0  # those before the end of the thinking section

    def step(self, step: Step) -> TextChunk:
        """Return a step with the text that it completes."""
        # Token after token: its text, calls, the thinking section or the content, stop strings in the content.
        pieces: list[str] = []
        calls: list[ToolCall] = []
        section = ""
        content = ""
        for used, token in enumerate(step.tokens, 1):
            text = self._detokenizer.add(token)
            if self._tools is not None:
                text, completed = self._tools.feed(text)
                calls += completed
            self._count += 1
            if not self._splitter.is_over:
                self._section_count = self._count
            new_section, new_content = self._splitter.feed(text)
            new_content, stopped = self._matcher.feed(new_content)
            section += new_section
            content += new_content
            # Without stop strings no text has to wait until its kind is known.
            pieces.append(new_section + new_content if self._has_stops else text)
            if stopped:
                self._request.cancel.set(after=self._count)  # the engine ends the generation before its next step
                step = _truncated(step, used)
                break

        rejected = tuple(map(self._tokenizer.token_text, step.rejected))
        text = "".join(pieces)
        opening, thinking, closing, content = self._by_kind(section, content, text)
        return TextChunk(
            text,
            step,
            opening=opening,
            thinking=thinking,
            closing=closing,
            content=content,
            pieces=tuple(pieces),
            rejected=rejected,
            calls=tuple(calls),
            call_deltas=self._call_deltas(),
            reports=self._reports(step) if step.logprobs is not None else (),
        )

    def end(self, finished: Finished) -> Completed:
        """Return the end with the text that was held back."""
        text = ""
        section = ""
        content = ""
        calls: tuple[ToolCall, ...] = ()
        if self._matcher.matched is None:
            cut = finished.reason != "stop"
            text = self._detokenizer.finish(cut=cut)
            if self._tools is not None:
                text, calls = self._tools.finish(text, cut=cut)
            section, content = self._splitter.finish(text)
            certain, _ = self._matcher.feed(content)
            remaining, _ = self._matcher.flush()
            content = certain + remaining
            if self._has_stops:
                text = section + content
        stop_string = self._matcher.matched
        if stop_string is not None:
            finished = replace(finished, reason="stop", stop_id=None, stop_string=stop_string)
        if self._splitter.has_section and self._counts_section:
            finished = replace(finished, thinking_tokens=self._section_count)
        return Completed(text, finished, *self._by_kind(section, content, text), calls, self._call_deltas())

    def _by_kind(self, section: str, content: str, text: str) -> tuple[str, str, str, str]:
        """Return opening, thinking, closing and content. See `TextChunk`."""
        if self._has_kinds:
            return self._splitter.by_kind(section, content)
        return ("", "", "", text)

    def _reports(self, step: Step) -> tuple[TokenReport, ...]:
        """Return the log probabilities of a step's tokens, with the tokens' texts."""
        reports = []
        for token, logprobs in zip(step.tokens, step.logprobs or (), strict=True):
            text = self._tokenizer.token_text(token)
            top = [(self._tokenizer.token_text(other), value) for other, value in logprobs.top]
            data = self._part_of_character(token, text)
            top_data = [
                self._part_of_character(other, described)
                for (other, _), (described, _) in zip(logprobs.top, top, strict=True)
            ]
            reports.append(TokenReport(text, logprobs.chosen, top, data, top_data))
        return tuple(reports)

    def _part_of_character(self, token: int, text: str) -> bytes | None:
        """Return the bytes of a token whose text lacks some of them; None for other tokens, and if they are unknown."""
        if "\ufffd" in text:
            return self._tokenizer.detokenizers.bytes_of(token)
        return None

    def _call_deltas(self) -> tuple[CallDelta, ...]:
        """Return the arguments of incomplete calls since the last time."""
        if self._tools is not None:
            return self._tools.take_deltas()
        return ()


def _truncated(step: Step, used: int) -> Step:
    """Return the step with only its first `used` tokens.

    A shortened step has no rejected draft tokens: they were proposed after the end of the answer. A whole step keeps
    them: the first was proposed in place of its last token.
    """
    # The record also counts an end-of-turn token, which is not in `step.tokens` and comes after the stop string.
    if used == step.record.tokens:
        return step
    logprobs = step.logprobs and step.logprobs[:used]
    return Step(step.tokens[:used], replace(step.record, accepted=used - 1), logprobs)
