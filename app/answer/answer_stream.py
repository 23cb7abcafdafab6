"""Parts of one answer for programs: `for part in stream` on any thread, `async for` in any event loop."""

from typing import Any

from headrace.app.answer.engine_thread import AnswerPart, EngineThread, OpenAnswer
from headrace.app.answer.generation import parsed_value
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime.errors import EngineError, HeadraceError


class AnswerStream:
    """An answer being generated: one `TextChunk` per decode step, then one `Completed` with the remaining text.

    It ends early with `close`, at the end of a `with` or `async with` block, when a wait for a part is interrupted or
    cancelled, and when it is dropped. The memory of its sequence is then free. `for` waits on its thread, `async for`
    lets other tasks run. Unread parts are kept; after 64 of them the model waits, unless it works for other answers.
    """

    def __init__(self, opened: OpenAnswer, engine: EngineThread, model: object, schema: object = None) -> None:
        """opened: the answer, which the engine's thread generates.

        engine: that thread.
        model: kept alive, since it frees the engine when it is dropped.
        schema: the caller's, for `parsed`.
        """
        self._opened = opened
        self._engine = engine
        self._model = model
        self._schema = schema
        self._is_interrupted = False

    def __repr__(self) -> str:
        answer = self._opened.answer
        state = "open"
        if answer.finished is not None:
            state = f"ended: {answer.end.ended_by}"
        elif self._opened.is_closed:
            state = "closed"
        count = sum(len(step.tokens) for step in answer.steps)
        return f"<headrace.AnswerStream: {count} tokens, {state}>"

    def __iter__(self) -> "AnswerStream":
        return self

    def __next__(self) -> TextChunk | Completed:
        self._engine.check_process()
        try:
            part = self._opened.get()
        except BaseException:  # KeyboardInterrupt
            self._interrupt()
            raise
        checked = self._check(part)
        if checked is None:
            raise StopIteration
        return checked

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> TextChunk | Completed:
        from asyncio import sleep

        self._engine.check_process()
        try:
            await sleep(0)  # other tasks run, also if parts are there already
            part = await self._opened.next()
        except BaseException:  # CancelledError; GeneratorExit, if the loop of the task was closed
            self._interrupt()
            raise
        checked = self._check(part)
        if checked is None:
            raise StopAsyncIteration
        return checked

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "AnswerStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def parsed(self) -> Any:
        """The value of an answer with a schema, after its end: see `Generation`. Reads the rest of the stream.

        Raises EngineError for an answer that a limit or `close` cut.
        """
        for _ in self:
            pass
        if self._opened.answer.finished is None:
            raise EngineError("the answer was closed before it was whole")
        return parsed_value(self._opened.answer, self._schema)

    def close(self) -> None:
        """End the generation, without waiting for it. Further reads end at once."""
        if self._opened.is_closed:
            return
        self._opened.close()
        if not self._opened.is_over:
            self._engine.wake()

    async def aclose(self) -> None:
        """Call `close`."""
        self.close()

    def _interrupt(self) -> None:
        self._is_interrupted = True
        self.close()

    def _check(self, part: AnswerPart | None) -> TextChunk | Completed | None:
        """Return a part for the caller, None after the end. Raises the answer's error."""
        if self._engine.is_paused:  # it waited for parts to be read
            self._engine.wake()
        if isinstance(part, HeadraceError):
            raise part
        if part is None and self._is_interrupted:
            raise EngineError(
                "the answer was ended when a wait for its next part was interrupted or cancelled",
                "asyncio.wait has a timeout that cancels nothing",
            )
        return part
