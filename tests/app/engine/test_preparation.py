"""A prompt that takes long to encode, or a grammar that takes long to compile, delays its own answer alone."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event as Flag
from typing import Any

import pytest

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.commands import Cancel, CountTokens, EngineCommand, Generate
from headrace.app.engine.events import Abandoned, Done, Event, Failed, TokensCounted
from headrace.app.engine.host import EngineHost
from headrace.app.engine.preparation import LONG_TEXT
from headrace.app.engine.process import CommandLoop, Inbox
from headrace.app.engine.wire import Channel, socket_pair
from headrace.models.text.encoding import encoding_ends, limited
from headrace.runtime.errors import ContextLimitError
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import write_chat_model

HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "hello " * (LONG_TEXT // 6 + 1)}]
SHORT_ANSWER = AnswerOptions(max_tokens=3)
JSON = AnswerOptions(max_tokens=3, schema={"type": "object"})
_SOCKETS: list[socket.socket] = []  # open until the process ends: an inbox that is closed ends it
ENDS = (Done, Failed, Abandoned, TokensCounted)


class Engine:
    """An engine of this process, which begins to prepare slow requests and holds them until `released`."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = Flag()
        self.ended: list[Event] = []
        self.host = EngineHost.load(ModelSpec(str(model), serving=True), lambda *_: None)
        ours, theirs = socket_pair()
        _SOCKETS.append(ours)
        self._ours = Channel[EngineCommand, Event](ours)
        self._loop = CommandLoop(Inbox(Channel(theirs)), self._take)
        self._loop._host = self.host
        answerer = self.host._answerer
        self._hold(
            monkeypatch, answerer.chat_prompt, "encode", lambda messages: len(messages[0]["content"]) > LONG_TEXT
        )
        self._hold(monkeypatch, answerer._grammars, "compile", lambda source: source is not None)

    @property
    def pending(self) -> int:
        return self._loop._preparation.pending

    def send(self, *commands: EngineCommand) -> None:
        for command in commands:
            self._ours.send(command, waits=True)

    def run(self, *, until: int) -> None:
        """Run until so many requests have ended."""
        while len(self.ended) < until:
            self._loop._step(self.host) if self.host.busy else self._loop._await_command()

    def _take(self, event: Event) -> None:
        if isinstance(event, ENDS):
            self.ended.append(event)

    def _hold(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_slow: Callable[[Any], bool]) -> None:
        call = getattr(owner, name)

        def held(first: Any, *rest: Any, **options: Any) -> Any:
            if is_slow(first):
                limited(lambda: self.released.wait(PATIENCE_S), 1_000_000_000)
            return call(first, *rest, **options)

        monkeypatch.setattr(owner, name, held)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    started = Engine(write_chat_model(tmp_path / "model"), monkeypatch)
    yield started
    started.released.set()


def ids(engine: Engine) -> list[int | None]:
    return [event.id for event in engine.ended if isinstance(event, ENDS)]


@pytest.mark.sampled
@pytest.mark.parametrize("slow", [Generate(1, LONG, SHORT_ANSWER), Generate(1, HELLO, JSON), CountTokens(1, LONG)])
def test_a_slow_request_delays_no_other(engine: Engine, slow: EngineCommand) -> None:
    engine.send(slow, Generate(2, HELLO, SHORT_ANSWER), CountTokens(3, HELLO), Generate(4, HELLO, SHORT_ANSWER))
    engine.run(until=3)
    assert sorted(map(str, ids(engine))) == ["2", "3", "4"]
    engine.released.set()
    engine.run(until=4)
    assert ids(engine)[-1] == 1


@pytest.mark.parametrize("slow", [Generate(1, LONG, SHORT_ANSWER), CountTokens(1, LONG)])
def test_a_slow_request_can_be_cancelled(engine: Engine, slow: EngineCommand) -> None:
    engine.send(slow, Cancel(1))
    engine.run(until=1)
    assert engine.ended == [Abandoned(1)]
    assert not engine.host.busy


def test_a_refused_schema_delays_nothing(engine: Engine) -> None:
    refused = AnswerOptions(max_tokens=3, schema={"not": {}})
    engine.send(Generate(1, HELLO, refused), Generate(2, HELLO, SHORT_ANSWER))
    engine.run(until=2)
    [failed] = [event for event in engine.ended if isinstance(event, Failed)]
    assert (failed.id, failed.error) == (1, "UsageError")
    assert engine.pending == 0


def test_a_text_that_has_too_many_tokens_for_certain_is_not_encoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = engine.host._loaded.tokenizer._encoder
    monkeypatch.setattr(type(encoder), "encode_here", None)
    refusal = "the prompt has at least 900 tokens, the context limit is 100"
    with encoding_ends(bool, 100), pytest.raises(ContextLimitError, match=refusal):
        encoder.encode("a" * 900 * encoder._longest_token)
