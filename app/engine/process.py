"""Command loop of the engine process, started by `app.engine.start`: commands arrive on a socket, events leave.

The main thread owns the model and runs one command after the other. Prompts of Generate and CountTokens are encoded on
other threads (`preparation.py`); answers that were prepared are given in one batch. Other commands wait until all
answers have ended. A thread reads the socket: it takes a Cancel during a generation, and ends the process when the chat
closes the socket.

`Inbox` receives, `CommandLoop` runs, `EventSender` sends. A new command needs its class in `commands.py`, a case in
`CommandLoop._run` (or in `Inbox._read`, if it is taken during an answer), and a method of `client.py`.

Guards: tests/app/engine/test_client.py, test_rest.py and test_preparation.py.
"""

import faulthandler
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.commands import (
    TIMED_EVERY,
    Cancel,
    CountTokens,
    EngineCommand,
    Generate,
    LimitKV,
    PrefetchPrompt,
    Pull,
    Quit,
    Rest,
    TimeSteps,
)
from headrace.app.engine.events import (
    Abandoned,
    BatchStatus,
    ContextFull,
    Delta,
    Done,
    Event,
    Failed,
    LoadProgress,
    Pulled,
    PullFailed,
    PullProgress,
    Ready,
    Recommended,
    SlowFirstPass,
    TokensCounted,
)
from headrace.app.engine.preparation import Preparation, Prepared
from headrace.app.engine.wire import Channel
from headrace.models.registry.progress import Progress
from headrace.runtime.errors import EngineError, HeadraceError
from headrace.runtime.machine.garbage import importing

if TYPE_CHECKING:
    from headrace.app.engine.host import EngineHost
    from headrace.runtime.engine.request import CancelFlag

_JOINING_S = 0.02  # for requests that join between two steps
_INTERVAL_S = 0.1  # between two reports of one stage: each is a message that the chat draws


class Inbox:
    """Commands in order, and the cancel flag of every generation.

    timed_every: of the newest TimeSteps.
    kv_bytes: of the newest LimitKV; None: no limit.
    """

    def __init__(self, channel: Channel[Event, EngineCommand]) -> None:
        self._channel = channel
        self._commands: deque[EngineCommand | Prepared] = deque()
        self._arrived = threading.Condition()
        self._cancelled: dict[int, CancelFlag] = {}
        self.timed_every = TIMED_EVERY
        self.kv_bytes: int | None = None
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next(self, timeout: float | None, *, joins: bool = False) -> EngineCommand | Prepared | None:
        """Wait for the next command or prepared request; None after `timeout` seconds.

        joins: wait until it is one that may run next to answers.
        """
        with self._arrived:
            is_ready = self._is_joining if joins else self.waiting
            if not self._arrived.wait_for(is_ready, timeout):
                return None
            return self._commands.popleft()

    def put(self, prepared: Prepared) -> None:
        """Hand over a request that was prepared, before all commands."""
        with self._arrived:
            self._commands.appendleft(prepared)
            self._arrived.notify()

    def waiting(self) -> bool:
        """True if a command has arrived."""
        return bool(self._commands)

    def _is_joining(self) -> bool:
        return bool(self._commands) and isinstance(self._commands[0], Generate | CountTokens | Prepared)

    def cancel_flag(self, generation: int) -> "CancelFlag":
        """Return the flag that a Cancel sets, also one that arrived before its Generate was started."""
        from headrace.runtime.engine.request import CancelFlag

        return self._cancelled.setdefault(generation, CancelFlag())

    def ended(self, generation: int) -> None:
        """Drop the flag of a generation."""
        self._cancelled.pop(generation, None)

    def _read(self) -> None:
        """Take commands as they arrive, on a thread; end this process when the socket closes."""
        # `poll`, not a blocking `recv`: that wakes up whenever the other end takes an event.
        arrival = select.poll()
        descriptor = self._channel.descriptor
        assert descriptor is not None
        arrival.register(descriptor, select.POLLIN)
        try:
            while self._channel.ended_at is None:
                arrival.poll()
                for command in self._channel.receive():
                    if isinstance(command, Cancel):
                        self.cancel_flag(command.id).set()
                    elif isinstance(command, TimeSteps):
                        self.timed_every = command.every
                    elif isinstance(command, LimitKV):
                        self.kv_bytes = command.total
                    else:
                        with self._arrived:
                            self._commands.append(command)
                            self._arrived.notify()
        finally:  # the chat is gone
            os._exit(0)


class EventSender:
    """Sends events, from any thread.

    Deltas do not wait for a suspended chat: they are queued until the socket takes them. Other events wait.
    """

    def __init__(self, channel: Channel[Event, EngineCommand], ended: Callable[[int], None]) -> None:
        """ended: called with the id of a generation after its last event."""
        self._channel = channel
        self._ended = ended
        self._lock = threading.Lock()  # downloads report progress from other threads

    def send(self, event: Event) -> None:
        """Send in order."""
        with self._lock:
            self._channel.send(event, waits=not isinstance(event, Delta | BatchStatus | SlowFirstPass))
        if isinstance(event, Done | ContextFull | Failed | Abandoned | TokensCounted) and event.id is not None:
            self._ended(event.id)


class CommandLoop:
    """Runs commands. `send` takes events, from any thread."""

    def __init__(self, inbox: Inbox, send: Callable[[Event], None]) -> None:
        self._inbox = inbox
        self._send = send
        self._host: EngineHost | None = None
        self._preparation = Preparation(inbox.put)

    def run(self) -> None:
        """Run commands for ever."""
        while True:
            if self._host is not None and self._host.busy:
                self._step(self._host)
            else:
                self._await_command()

    def _await_command(self) -> None:
        """Run the next command, or idle work while none comes."""
        idle = None
        if self._host is not None:
            idle = self._host.idle
        # Three waits: for the start of an answer, until idle work is due, and without an end.
        if self._preparation.pending:  # an answer is about to begin: other commands wait, as during one
            command = self._inbox.next(None, joins=True)
        elif idle is not None and idle.due:
            command = self._inbox.next(idle.after_s)
        else:
            command = self._inbox.next(None)
        if command is not None:
            if idle is not None and isinstance(command, Rest):
                idle.rest()
            elif idle is not None:
                idle.resume()
            self._run(command)
        elif idle is not None:
            idle.run(self._inbox.waiting, self._send)

    def _step(self, host: "EngineHost") -> None:
        """Run one step of all answers; new requests join before it."""
        until = time.monotonic() + _JOINING_S
        while (command := self._inbox.next(0, joins=True)) is not None:
            self._run(command)
            if time.monotonic() > until:
                break
        if self._inbox.kv_bytes is not None:
            host.limit_kv(self._inbox.kv_bytes)
        try:
            host.step(self._send, self._inbox.timed_every)
        except Exception as error:  # all answers end with it, the process goes on
            for generation in host.drop():
                self._send(_failed(generation, error))

    def _run(self, command: EngineCommand | Prepared) -> None:
        """Run one command. Its errors are sent as events."""
        try:
            match command:
                case ModelSpec():
                    self._load(command)
                case Generate() | CountTokens():
                    if (host := self._host) is None:
                        raise EngineError("no model is loaded")
                    cancel = self._inbox.cancel_flag(command.id)
                    self._preparation.submit(command, partial(host.prepare, command, cancel, self._send))
                case Prepared():
                    self._preparation.pending -= 1
                    if command.error is not None:
                        self._send(_failed(command.id, command.error))
                    elif command.start is not None:
                        command.start()
                case PrefetchPrompt():
                    self._prefetch(command)
                case Pull():
                    self._pull(command.name)
                case Quit():
                    self._quit(command.seconds)
        except Exception as error:  # of one command: it is reported, and the next one runs
            generation = None
            if isinstance(command, Generate | CountTokens | Prepared):
                generation = command.id
            failed = _failed(generation, error)
            if isinstance(command, Pull):
                self._send(PullFailed(command.name, failed.message, failed.hint))
            else:
                self._send(failed)

    def _load(self, spec: ModelSpec) -> None:
        """Load a model: LoadProgress while it loads, then Ready. Idle work may begin after that."""
        self._send(LoadProgress("starting", 0, None))
        with importing():
            from headrace.app.engine.host import EngineHost

        progress = throttled(lambda stage, done, total: self._send(LoadProgress(stage, done, total)))
        download_progress = throttled(
            lambda stage, done, total: self._send(LoadProgress(stage, done, total, is_download=True))
        )
        self._host = EngineHost.load(spec, progress, download_progress)
        self._send(Ready(self._host.card()))
        self._host.report_first_pass(self._send)
        self._host.warm_up()
        self._host.idle.start(self._send)
        if self._host.is_sample and not spec.serving:
            self._host.idle.prepare = partial(self._recommend, self._host)

    def _recommend(self, host: "EngineHost") -> None:
        if (model := host.recommended()) is not None:
            self._send(Recommended(model))

    def _prefetch(self, command: PrefetchPrompt) -> None:
        if self._host is None or self._inbox.waiting():
            return
        try:
            self._host.prefetch(command, self._inbox.waiting, self._send)
        except HeadraceError:  # reported when the message is sent
            pass
        except Exception:
            traceback.print_exc()

    def _pull(self, name: str) -> None:
        from headrace.models.registry.resolve import resolve

        progress = throttled(lambda stage, done, total: self._send(PullProgress(name, stage, done, total)))
        resolve(name, progress=progress, refresh=True)
        self._send(Pulled(name))

    def _quit(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        if self._host is not None:
            self._host.idle.write_disk_cache(lambda: time.monotonic() > end)
        os._exit(0)  # at once: tearing down MLX and Python takes a while, and nothing is left to save


def _failed(generation: int | None, error: BaseException) -> Failed:
    """Return the event of an error; unexpected ones go to the log."""
    if isinstance(error, HeadraceError):
        return Failed(generation, str(error), error.hint, type(error).__name__)
    traceback.print_exception(error)
    return Failed(generation, f"internal error: {error!r:.300}", "engine.log has the details")


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until its other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the chat
    faulthandler.enable()
    channel = Channel[Event, EngineCommand](socket.socket(fileno=descriptor))
    inbox = Inbox(channel)
    CommandLoop(inbox, EventSender(channel, inbox.ended).send).run()


def throttled(sink: Progress) -> Progress:
    """Return a sink that passes one report of a stage per _INTERVAL_S, its first, and its last if `total` is known."""
    passed: dict[str, float] = {}

    def report(stage: str, done: int, total: int | None, /) -> None:
        now = time.monotonic()
        if done != total and now - passed.get(stage, float("-inf")) < _INTERVAL_S:
            return
        passed[stage] = now
        sink(stage, done, total)

    return report
