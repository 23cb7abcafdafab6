"""A chat's engine on a server: any that has OpenAI's chat completions, with all figures if it is headrace's own.

One thread per answer reads its stream, a `RemoteAnswer` makes events of the chunks, and `poll` never blocks.

Guard: tests/app/engine/test_remote.py.
"""

import itertools
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection
from queue import Empty, SimpleQueue
from socket import SHUT_RDWR
from typing import Any

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineState, generations_to_cancel
from headrace.app.engine.commands import Generate, PrefetchPrompt
from headrace.app.engine.events import Abandoned, AnswerEvent, Done, Event, Failed, LoadProgress, Ready
from headrace.app.engine.http_address import HTTPAddress, ServerError, events, reason
from headrace.app.engine.model_card import ModelCard
from headrace.app.engine.remote_answer import RemoteAnswer
from headrace.app.engine.telemetry import count_of, event_of
from headrace.app.engine.telemetry_reader import telemetry_path
from headrace.runtime.errors import EngineError

_CONNECT_S = 10.0  # for a connection
_SILENCE_S = 600.0  # without a byte from the server
_OWNER = "headrace"  # owner of the models of our own server: `owned_by` in `app.server.models`
_CONTEXT = ("context_length", "max_model_len")  # keys of a model's context limit: headrace's, and vLLM's
# Options that other servers do not know: some refuse unknown fields.
_HEADRACE_ONLY = ("speculate", "thinking", "schema", "regex", "grammar")
_POLL_S = 0.05  # between two reads of the state by a waiting answer


class RemoteEngine:
    """A ChatEngine over HTTP. model: the name of the model; None: the server's first."""

    def __init__(self, address: HTTPAddress, model: str | None = None) -> None:
        self.state: EngineState = "stopped"
        self.card: ModelCard | None = None
        self.pid: int | None = None
        self.is_remote = True
        self.starts = 0
        self._address = address
        self._model = model
        self._is_headrace = False  # it is headrace's own server
        self._events: SimpleQueue[tuple[int, Event]] = SimpleQueue()  # with the number of the start they belong to
        self._round = itertools.count(1)
        self._current = 0  # number of the latest start: events of earlier ones are dropped
        self._running: dict[int, HTTPConnection | None] = {}  # of answers to generate; None: not connected yet
        self._open: set[int] = set()  # answers whose last event has not been polled
        self._changes = threading.Lock()  # of `_running`

    def start(self, spec: ModelSpec) -> None:  # noqa: ARG002 - the server chose its model
        self.close()
        self.starts += 1
        self.state = "loading"
        self._current = next(self._round)
        threading.Thread(target=self._connect, args=(self._current,), daemon=True).start()

    def restart(self) -> None:
        self.start(ModelSpec())

    def submit(self, command: Generate) -> None:
        if self.state not in ("loading", "ready"):
            raise EngineError("the server is not connected", "restart the connection")
        self._open.add(command.id)
        with self._changes:
            self._running[command.id] = None
        threading.Thread(target=self._answer, args=(self._current, command), daemon=True).start()

    def prefetch(self, command: PrefetchPrompt) -> None:
        """Do nothing: a server has no request for this, and other users."""

    def rest(self) -> None:
        """Do nothing: a server's idle work is its own."""

    def time_steps(self, every: int) -> None:
        """Do nothing: a server times no steps for a client."""

    def cancel(self, generation: int | None = None) -> None:
        for each in generations_to_cancel(self._open, generation):
            self._events.put((self._current, Abandoned(each)))  # before the error of the closed connection
            with self._changes:
                connection = self._running.pop(each, None)
            sock = None
            if connection is not None:
                sock = connection.sock
            if sock is not None:
                with suppress(OSError):  # the server has ended the connection, or the thread just has
                    sock.shutdown(SHUT_RDWR)  # wakes the thread that reads

    def poll(self) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                number, event = self._events.get_nowait()
            except Empty:
                return events
            if number == self._current and self._note(event):
                events.append(event)

    def pull(self, name: str) -> None:
        raise EngineError(f"{name}: models of a server are fetched there")

    def cancel_pull(self) -> None:
        """Do nothing: `pull` never begins."""

    def close(self) -> None:
        self.cancel()
        self._current = next(self._round)
        self._open.clear()
        self.state = "stopped"
        self.card = None

    def _note(self, event: Event) -> bool:
        """Update the state; return whether the event is awaited."""
        if isinstance(event, Ready):
            self.state = "ready"
            self.card = event.card
        elif isinstance(event, Failed) and event.id is None:
            self.state = "failed"
        elif isinstance(event, AnswerEvent) and event.id is not None:
            if event.id not in self._open:
                return False
            if isinstance(event, Done | Failed | Abandoned):
                self._open.discard(event.id)
        return True

    # -- threads: they put events into the queue, and change no state but `_model`, `_is_headrace` and `_running` -----

    def _connect(self, number: int) -> None:
        """Find the model of a start, loaded if need be, and put its Ready or Failed."""
        self._events.put((number, LoadProgress(f"connecting to {self._address.url}", 0, None)))
        try:
            models = self._address.get("/v1/models", _CONNECT_S)["data"]
            model = next((each for each in models if self._model in (None, each["id"])), None)
            if model is None:
                raise ServerError(f"the server has no model {self._model!r}")
            self._model = str(model["id"])
            self._is_headrace = model.get("owned_by") == _OWNER
            if self._is_headrace and model.get("status", {}).get("value") == "unloaded":
                self._address.load_model(self._model, _SILENCE_S)
            if self._is_headrace:
                card = self._headrace_card()
            else:
                card = unknown_card(self._model, model)
            self._events.put((number, Ready(card)))
        except Exception as error:  # a server may answer anything, and this thread has nobody above it
            self._events.put((number, Failed(None, f"{self._address.url}: {reason(error)}", None)))

    def _headrace_card(self) -> ModelCard:
        """Return the model's card on headrace's own server."""
        connection = self._address.connection(_CONNECT_S)
        try:
            for name, data in events(self._address.ask(connection, telemetry_path(self._model))):
                if isinstance(event := event_of(name, json.loads(data)), Ready):
                    return event.card
            raise ServerError("the server has no loaded model")
        finally:
            connection.close()

    def _answer(self, number: int, command: Generate) -> None:
        """Put the events of one answer. number: of the start that it belongs to."""
        while self.state == "loading" and number == self._current:  # `poll` notes the end of loading
            time.sleep(_POLL_S)
        if number != self._current or command.id not in self._running:
            return
        answer = RemoteAnswer(command, is_headrace=self._is_headrace)
        connection = self._address.connection(_SILENCE_S)
        try:
            if command.begun.text and (not self._is_headrace or command.begun.is_open):
                raise ServerError("this server cannot continue this answer")
            connection.connect()
            # `cancel` shuts a socket down. One that came before there was a socket is noticed here, before the request.
            with self._changes:
                if number != self._current or command.id not in self._running:
                    return
                self._running[command.id] = connection
            response = self._address.ask(connection, "/v1/chat/completions", self._body(command))
            for _, data in events(response):
                if data == "[DONE]":
                    answer.is_whole = True
                    continue
                for event in answer.take(json.loads(data)):
                    self._events.put((number, event))
            for event in answer.end():
                self._events.put((number, event))
        except Exception as error:  # the thread's last event, after any error: a reader waits for one
            self._events.put((number, Failed(command.id, reason(error), None)))
        finally:
            with self._changes:
                self._running.pop(command.id, None)
            connection.close()

    def _body(self, command: Generate) -> dict[str, object]:
        """Return the request. Raises ServerError for options that another server cannot honour and that must hold."""
        options = command.options.given()
        messages = [dict(message) for message in command.messages]
        if self._is_headrace:
            options["headrace"] = {"steps": True}
        else:
            options = {key: value for key, value in options.items() if key not in _HEADRACE_ONLY}
            options |= _response_format(command.options)
            for message in messages:  # some refuse thinking that is sent back
                message.pop("reasoning_content", None)
        if command.begun.text:
            messages.append({"role": "assistant", "content": command.begun.text})
            options |= {"continue_final_message": True}
        return {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }


def _response_format(options: AnswerOptions) -> dict[str, object]:
    """Return the field that asks another server for a schema, none without.

    Raises ServerError for a regular expression or a grammar, which is never dropped: the answer would not fit.
    """
    if options.grammar_source() is None:
        return {}
    if options.schema is None:
        raise ServerError("only headrace's own server takes a regular expression or a grammar")
    schema = {"name": "answer", "strict": True, "schema": options.schema}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def unknown_card(name: str, model: Mapping[str, Any]) -> ModelCard:
    """Return the card of a model that another program serves: its sizes and machine are unknown."""
    from headrace.runtime.machine.hardware import Machine
    from headrace.runtime.metrics.cost import StepCost

    limit = next((count for count in (count_of(model.get(key)) for key in _CONTEXT) if count), 0)
    machine = Machine(
        backend="cpu",
        device_name="a server",
        architecture="",
        memory_bytes=None,
        device_memory_bytes=None,
        os="",
        cpu="",
        physical_cores=1,
        usable_cores=1,
        isa=frozenset(),
    )
    _ = machine.chip  # None, of the table of chips: read here, where it may take its time, and cached
    return ModelCard(
        name=name,
        path="",
        origin="",
        licence=None,
        kind="",
        context_limit=limit,
        weight_bytes=0,
        cost=StepCost(0, 0, []),
        generation_defaults={},
        thinks=True,
        load_s=0.0,
        machine=machine,
        peak=None,
        budget=None,
        kernels={},
        spare_cpus=1,
        active_memory_bytes=0,
        notes=("sizes and memory of this server are unknown",),
    )
