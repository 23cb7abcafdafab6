"""Parts of one answer for programs: `for part in stream`, or `async for` on the thread that loaded the model."""

import threading
from collections.abc import Callable, Generator
from typing import Any

from headrace.models.text.answer import Completed, Part, TextChunk
from headrace.runtime.engine.request import PrefillProgress
from headrace.runtime.errors import EngineError


class AnswerStream:
    """An answer being generated: one `TextChunk` per decode step, then one `Completed` with the remaining text.

    `close` ends the generation, as does dropping the stream. With `async for`, other tasks run between two steps.
    """

    def __init__(
        self, parts: Generator[Part, None, None], thread: int, parsed: Callable[[], Any] = lambda: None
    ) -> None:
        """thread: identifier of the model's thread. parsed: returns the value of the whole answer."""
        self._parts = parts
        self._thread = thread
        self._parsed = parsed

    def __iter__(self) -> "AnswerStream":
        return self

    def __next__(self) -> TextChunk | Completed:
        while isinstance(part := self._next(), PrefillProgress):
            pass
        return part

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> TextChunk | Completed:
        from asyncio import sleep  # late: programs without tasks do not need it

        while True:
            await sleep(0)
            try:
                part = self._next()
            except StopIteration:
                raise StopAsyncIteration from None
            if not isinstance(part, PrefillProgress):
                return part

    @property
    def parsed(self) -> Any:
        """The value of an answer with a schema, after its end: see `Generation`. Reads the rest of the stream.

        Raises EngineError for an answer that a limit cut.
        """
        for _ in self:
            pass
        return self._parsed()

    def close(self) -> None:
        """End the generation."""
        self._parts.close()

    async def aclose(self) -> None:
        """End the generation."""
        self.close()

    def _next(self) -> Part:
        require_thread(self._thread)
        return next(self._parts)


def require_thread(thread: int) -> None:
    """Raise EngineError on another thread than the model's."""
    if threading.get_ident() != thread:
        raise EngineError("a model answers on the thread that loaded it", "load and use it on one thread")
