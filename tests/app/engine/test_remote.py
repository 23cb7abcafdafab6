"""A chat's engine on a server: headrace's own, and one of another program."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Abandoned, Delta, Done, Event, Failed, LoadProgress, Prefill, Ready
from headrace.app.engine.http_address import HTTPAddress
from headrace.app.engine.remote import RemoteEngine
from headrace.models.text.thinking import read_tags
from headrace.runtime.errors import EngineError
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import IM_END

E = TypeVar("E", bound=Event)
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = AnswerOptions(temperature=1.0, seed=1, max_tokens=30, logit_bias={IM_END: -100})


def until(engine: RemoteEngine, wanted: type[E], seen: list[Event] | None = None) -> E:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for event in engine.poll():
            if seen is not None:
                seen.append(event)
            if isinstance(event, wanted):
                return event
        time.sleep(0.005)
    raise AssertionError(f"no {wanted.__name__} came")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("home"), "-m", str(model), "-q") as running:
        yield running


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(HTTPAddress(server.root))
    yield engine
    engine.close()


def test_an_answer_of_a_headrace_server_has_all_figures(engine: RemoteEngine) -> None:
    engine.start(ModelSpec("whatever"))
    engine.submit(Generate(7, HELLO, OPTIONS))  # waits for the connection
    events: list[Event] = []
    done = until(engine, Done, events)
    assert isinstance(events[0], LoadProgress)
    (card,) = (event.card for event in events if isinstance(event, Ready))
    assert (engine.state, engine.card, card.name) == ("ready", card, "chat")
    assert card.kv_bytes_per_token > 0
    assert (done.id, done.end.reason, done.end.summary.completion_tokens) == (7, "length", 30)
    steps = [record for event in events if isinstance(event, Delta) for record in event.records]
    assert [step.index for step in steps] == list(range(30))
    assert all(step.weight_bytes > 0 for step in steps)
    assert any(isinstance(event, Prefill) and event.id == 7 for event in events)
    text = "".join(event.text for event in events if isinstance(event, Delta))
    again: list[Event] = []
    engine.submit(Generate(8, HELLO, OPTIONS))
    until(engine, Done, again)
    assert "".join(event.text for event in again if isinstance(event, Delta)) == text != ""


def test_an_answer_is_continued(engine: RemoteEngine) -> None:
    """Its beginning stands in the prompt, behind the head of the assistant's message."""
    engine.start(ModelSpec())
    until(engine, Ready)
    whole: list[Event] = []
    engine.submit(Generate(1, HELLO, OPTIONS))
    until(engine, Done, whole)
    text = "".join(event.text for event in whole if isinstance(event, Delta))
    rest: list[Event] = []
    engine.submit(Generate(2, HELLO, OPTIONS, begun=read_tags(text[:5])))
    done = until(engine, Done, rest)
    (first,) = (event.end.summary.prompt_tokens for event in whole if isinstance(event, Done))
    assert done.end.summary.prompt_tokens > first
    assert "".join(event.text for event in rest if isinstance(event, Delta))


def test_a_cancelled_answer_ends_on_the_server_too(engine: RemoteEngine, server: ServerProcess) -> None:
    engine.start(ModelSpec())
    until(engine, Ready)
    engine.submit(Generate(1, HELLO, replace(OPTIONS, max_tokens=None)))
    until(engine, Delta)
    engine.cancel(1)
    assert until(engine, Abandoned).id == 1
    server.until(requests=0)
    assert engine.poll() == []


def test_cancelling_an_answer_whose_connection_has_just_ended_is_harmless() -> None:
    engine = RemoteEngine(HTTPAddress("http://127.0.0.1:1"))
    with closing(HTTPConnection("127.0.0.1")) as connection:
        connection.sock = socket.socket()  # connected to nothing
        engine._open.add(1)
        engine._running[1] = connection
        engine.cancel(1)
    assert engine.poll() == [Abandoned(1)]


def test_errors_of_the_server_are_errors_of_the_answer(engine: RemoteEngine) -> None:
    engine.start(ModelSpec())
    until(engine, Ready)
    engine.submit(Generate(1, [{"role": "user", "content": "x"}], AnswerOptions(logit_bias={10**8: 1.0})))
    failed = until(engine, Failed)
    assert failed.id == 1
    assert "token 100000000" in failed.message
    engine.submit(Generate(2, HELLO, OPTIONS, begun=read_tags("<think>\nso far")))
    assert until(engine, Failed).id == 2
    with pytest.raises(EngineError):
        engine.pull("a-model")
    engine.close()
    with pytest.raises(EngineError):
        engine.submit(Generate(3, HELLO))


def test_an_unreachable_server_is_reported_with_its_address() -> None:
    engine = RemoteEngine(HTTPAddress("http://127.0.0.1:1"))
    engine.start(ModelSpec())
    failed = until(engine, Failed)
    assert failed.id is None
    assert "127.0.0.1:1" in failed.message
    assert engine.state == "failed"
    engine.restart()
    assert engine.starts == 2
    engine.close()


class Other(BaseHTTPRequestHandler):
    """A server of another program: two models, a thinking one, no figures."""

    bodies: list[Any] = []  # noqa: RUF012
    chunks: Callable[[], list[Any]] = list
    last = b"data: [DONE]\n\n"
    models: Any = ({"id": "a"}, {"id": "b", "max_model_len": 4096})

    def do_GET(self) -> None:
        self._send(json.dumps({"data": self.models}).encode())

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        lines = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in type(self).chunks()]
        self._send(b"".join([*lines, self.last]))

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def chunk(reason: str | None = None, **delta: str) -> Any:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def test_an_answer_of_another_openai_server_is_read(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    chunks = [chunk(reasoning_content="hm"), chunk(content="So "), chunk(content="be it."), chunk("length")]
    monkeypatch.setattr(Other, "chunks", staticmethod(lambda: [*chunks, {"choices": [], "usage": usage}]))
    engine = RemoteEngine(HTTPAddress(other), "b")
    engine.start(ModelSpec())
    card = until(engine, Ready).card
    assert (card.name, card.context_limit, card.weight_bytes) == ("b", 4096, 0)
    events: list[Event] = []
    engine.submit(Generate(1, HELLO, AnswerOptions(temperature=0.5, thinking=True)))
    done = until(engine, Done, events)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [(event.thinking, event.content) for event in deltas] == [("hm", ""), ("", "So "), ("", "be it.")]
    assert "".join(event.text for event in deltas) == "<think>\nhm\n</think>\n\nSo be it."
    assert all(not event.has_steps and not event.steps for event in deltas), "a server tells no steps"
    assert (done.end.reason, done.end.summary.completion_tokens, done.end.summary.reused_tokens) == ("length", 5, 4)
    assert done.end.summary.ttft_s is not None
    body = Other.bodies[-1]
    assert (body["model"], body["temperature"], body["stream"]) == ("b", 0.5, True)
    assert not {"thinking", "headrace"} & body.keys()  # other servers would refuse them
    engine.submit(Generate(2, HELLO, AnswerOptions(schema={"type": "integer"})))
    until(engine, Done)
    assert Other.bodies[-1]["response_format"]["json_schema"]["schema"] == {"type": "integer"}
    engine.submit(Generate(3, HELLO, AnswerOptions(regex="a")))
    assert "regular expression" in until(engine, Failed).message


@pytest.mark.parametrize("moment", ["submitted", "connecting"])
def test_an_answer_that_is_cancelled_before_it_is_connected_is_not_requested(
    other: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine = RemoteEngine(HTTPAddress(other))
    engine.start(ModelSpec())
    until(engine, Ready)
    closed = threading.Event()

    class Connection(HTTPConnection):
        def connect(self) -> None:
            if moment == "connecting":
                engine.cancel(1)
            super().connect()

        def close(self) -> None:
            super().close()
            closed.set()

    def connection(_timeout_s: float) -> HTTPConnection:
        if moment == "submitted":
            engine.cancel(1)
        return Connection("127.0.0.1", engine._address._port)

    requests = len(Other.bodies)
    monkeypatch.setattr(engine._address, "connection", connection)
    engine.submit(Generate(1, HELLO))
    assert until(engine, Abandoned).id == 1
    assert closed.wait(PATIENCE_S)
    assert len(Other.bodies) == requests


def test_an_error_in_the_stream_of_another_server(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [chunk(content="So "), {"error": {"message": "out of\nmemory", "code": 500}}]
    monkeypatch.setattr(Other, "chunks", staticmethod(lambda: broken))
    engine = RemoteEngine(HTTPAddress(other))
    engine.start(ModelSpec())
    until(engine, Ready)
    engine.submit(Generate(1, HELLO))
    failed = until(engine, Failed)
    assert (failed.id, failed.message) == (1, "out of memory")


@pytest.mark.parametrize("ends_by", ["finish_reason", "line", "neither"])
def test_an_answer_that_breaks_off_has_failed(other: str, monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
    chunks = [chunk(content="So "), chunk("stop" if ends_by == "finish_reason" else None, content="be")]
    monkeypatch.setattr(Other, "chunks", staticmethod(lambda: chunks))
    if ends_by != "line":
        monkeypatch.setattr(Other, "last", b"")
    engine = RemoteEngine(HTTPAddress(other))
    engine.start(ModelSpec())
    until(engine, Ready)
    events: list[Event] = []
    engine.submit(Generate(1, HELLO))
    until(engine, Failed if ends_by == "neither" else Done, events)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "So be"


@pytest.mark.parametrize("count", [math.inf, 10**400, -3, "many", [1]], ids=repr)
def test_unusable_counts_of_another_server_are_left_out(
    other: str, monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
    chunks = [chunk(content="So be it."), {"choices": [], "usage": usage}, {"choices": [], "usage": [count]}]
    monkeypatch.setattr(Other, "chunks", staticmethod(lambda: chunks))
    monkeypatch.setattr(Other, "models", [{"id": "a", "max_model_len": count}])
    engine = RemoteEngine(HTTPAddress(other))
    engine.start(ModelSpec())
    assert until(engine, Ready).card.context_limit == 0
    engine.submit(Generate(1, HELLO))
    summary = until(engine, Done).end.summary
    assert (summary.prompt_tokens, summary.reused_tokens, summary.completion_tokens) == (0, 0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 \x1b]0;owned\x07\x9b2J\r\n\r\n",
        b'HTTP/1.1 404 x\r\n\r\n{"error": {"message": "\\u001b]0;owned\\u0007\\u009b2J\\u202e"}}',
        b'HTTP/1.1 200 x\r\n\r\n{"\\u001b]0;owned": 1}',
    ],
    ids=["status line", "error", "document"],
)
def test_errors_of_a_server_are_one_safe_line(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        engine = RemoteEngine(HTTPAddress(f"127.0.0.1:{listener.getsockname()[1]}"))
        engine.start(ModelSpec())
        message = until(engine, Failed).message
        thread.join()
    assert message.isprintable()
    assert "127.0.0.1" in message


@pytest.mark.parametrize("status", [None, "loaded"])
def test_a_model_of_another_shape_is_a_failed_start(other: str, monkeypatch: pytest.MonkeyPatch, status: Any) -> None:
    monkeypatch.setattr(Other, "models", [{"id": "a", "owned_by": "headrace", "status": status}])
    engine = RemoteEngine(HTTPAddress(other))
    engine.start(ModelSpec())
    assert until(engine, Failed).id is None
    assert engine.state == "failed"
