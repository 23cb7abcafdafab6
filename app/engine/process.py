"""The engine's process: commands come in over a socket, events go out. Run by `app.engine.start`.

The main thread owns the model for life and does one command after the other; generations that come one behind the
other are answered side by side, and what comes behind them waits until all have ended. A second thread reads the
socket, so that a Cancel is heard during a generation, and ends the process the moment the chat's end is closed.
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
from typing import TYPE_CHECKING, cast

from headrace.app.engine.messages import (
    Cancel,
    Command,
    ContextFull,
    Delta,
    Done,
    Event,
    Failed,
    Generate,
    LoadProgress,
    ModelSpec,
    PrefetchPrompt,
    Pull,
    Pulled,
    PullFailed,
    PullProgress,
    Quit,
    Ready,
    Rest,
    Served,
)
from headrace.app.engine.throttle import throttled
from headrace.app.engine.wire import CHUNK, Unpacker, pack
from headrace.runtime.errors import EngineError, HeadraceError

if TYPE_CHECKING:
    from headrace.app.engine.host import EngineHost
    from headrace.runtime.engine.request import CancelFlag

_IDLE_S = 1.5  # without a command, before chats are kept and the machine's bandwidth is measured


class Inbox:
    """Commands in order, and the cancel flag of every generation."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._cancelled: dict[int, CancelFlag] = {}
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next(self, timeout: float | None) -> Command | None:
        """The next command; None when there was none for `timeout` seconds."""
        with self._arrived:
            return self._commands.popleft() if self._arrived.wait_for(self.waiting, timeout) else None

    def next_generate(self) -> Generate | None:
        """The next command if it has come and is to generate; it does not wait for one."""
        with self._arrived:
            if not self._commands or not isinstance(self._commands[0], Generate):
                return None
            return cast(Generate, self._commands.popleft())

    def waiting(self) -> bool:
        """Whether a command has come that `next` would give at once."""
        return bool(self._commands)

    def cancel_flag(self, generation: int) -> "CancelFlag":
        """The flag that a Cancel for `generation` sets, even if it came before its Generate was begun."""
        from headrace.runtime.engine.request import CancelFlag

        return self._cancelled.setdefault(generation, CancelFlag())

    def over(self, generation: int) -> None:
        """The generation has ended; its flag is not needed any more."""
        self._cancelled.pop(generation, None)

    def _read(self) -> None:
        incoming = Unpacker()
        # Waited for here, not in `recv`, which wakes up for an instant whenever the other end takes an event.
        arrival = select.poll()
        arrival.register(self._connection, select.POLLIN)
        try:
            while arrival.poll() and (piece := self._connection.recv(CHUNK)):
                for command in incoming.feed(piece):
                    if isinstance(command, Cancel):
                        self.cancel_flag(command.id).set()
                    else:
                        with self._arrived:
                            self._commands.append(command)
                            self._arrived.notify()
        finally:  # the chat is gone, and there is nobody else to work for
            os._exit(0)


class Outlet:
    """Sends events, from any thread. An answer never waits for a screen that stands still (a terminal held, a chat
    suspended): its deltas queue up here until the socket has room again. All else is waited for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting = bytearray()
        self._lock = threading.Lock()  # downloads report progress from threads of their own

    def send(self, event: Event) -> None:
        """On its way, in order. Raises OSError when the chat is gone."""
        with self._lock:
            self._waiting += pack(event)
            wait = 0 if not isinstance(event, Delta | Served) else socket.MSG_DONTWAIT
            try:
                while self._waiting:
                    del self._waiting[: self._connection.send(self._waiting, wait)]
            except BlockingIOError:
                pass  # with the next event


class Server:
    """Does what the commands ask for. `send` takes events, from any thread."""

    def __init__(self, inbox: Inbox, send: Callable[[Event], None]) -> None:
        self._inbox = inbox
        self._send = send
        self._host: EngineHost | None = None
        self._measurable = True
        self._resting = False

    def serve(self) -> None:
        """What the commands ask for, for ever."""
        while True:
            if self._host is not None and self._host.busy:
                self._go_on(self._host)
            else:
                self._await_command()

    def _await_command(self) -> None:
        host = None if self._resting else self._host
        keeping = host is not None and host.keeping_due
        due = keeping or (self._measurable and host is not None and host.reading_due)
        command = self._inbox.next(_IDLE_S if due else None)
        if command is None:
            self._keep(self._inbox.waiting) if keeping else self._measure()
        else:
            self._rest(isinstance(command, Rest))
            self._do(command)

    def _go_on(self, host: "EngineHost") -> None:
        """One step of what is being answered; who has asked meanwhile joins."""
        if (command := self._inbox.next_generate()) is not None:
            self._do(command)
        try:
            host.step(self._send_on)
        except HeadraceError as error:
            for generation in host.lost():
                self._send_on(Failed(generation, str(error), error.hint))
        except Exception as error:
            traceback.print_exc()  # into the log
            for generation in host.lost():
                self._send_on(Failed(generation, *_internal(error)))

    def _send_on(self, event: Event) -> None:
        """Send it; where it ends a generation, that one's flag is not needed any more."""
        self._send(event)
        if isinstance(event, Done | ContextFull | Failed) and event.id is not None:
            self._inbox.over(event.id)

    def _do(self, command: Command) -> None:
        try:
            if isinstance(command, ModelSpec):
                self._load(command)
            elif isinstance(command, Generate):
                if self._host is None:
                    raise EngineError("no model is loaded")
                self._host.begin(command, self._inbox.cancel_flag(command.id), self._send_on)
            elif isinstance(command, PrefetchPrompt):
                self._prefetch(command)
            elif isinstance(command, Pull):
                self._pull(command.name)
            elif isinstance(command, Quit):
                self._quit(command.seconds)
        except HeadraceError as error:
            self._send_on(_failure(command, str(error), error.hint))
        except Exception as error:
            traceback.print_exc()  # into the log
            self._send_on(_failure(command, *_internal(error)))

    def _rest(self, wanted: bool) -> None:
        if self._host is not None and wanted != self._resting:
            self._host.rest() if wanted else self._host.resume()
            self._resting = wanted

    def _prefetch(self, command: PrefetchPrompt) -> None:
        if self._host is None or self._inbox.waiting():
            return
        try:
            self._host.prefetch(command, self._inbox.waiting, self._send)
        except HeadraceError:  # nobody has asked yet; whoever does will be told
            pass
        except Exception:
            traceback.print_exc()

    def _load(self, spec: ModelSpec) -> None:
        self._send(LoadProgress("starting", 0, None))
        from headrace.app.engine.host import EngineHost

        progress = throttled(lambda stage, done, total: self._send(LoadProgress(stage, done, total)))
        self._host = EngineHost.load(spec, progress)
        self._send(Ready(self._host.card()))
        self._host.warm_up()
        self._host.check_files(self._send)

    def _pull(self, name: str) -> None:
        from headrace.models.registry.resolve import resolve

        progress = throttled(lambda stage, done, total: self._send(PullProgress(name, stage, done, total)))
        resolve(name, progress=progress, refresh=True)
        self._send(Pulled(name))

    def _quit(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        if self._host is not None and self._host.keeping_due:
            self._keep(lambda: time.monotonic() > end)
        os._exit(0)

    def _keep(self, stop: Callable[[], bool]) -> None:
        assert self._host is not None
        try:
            self._host.keep(stop)
        except Exception:  # it can be computed again
            traceback.print_exc()

    def _measure(self) -> None:
        assert self._host is not None
        try:
            self._send(self._host.measure())
        except Exception:  # no measurement, no MBU; nothing else is lost
            traceback.print_exc()
            self._measurable = False


def _internal(error: Exception) -> tuple[str, str]:
    """A message and a hint, for what nobody expected."""
    return f"internal error: {error!r:.300}", "engine.log has the details"


def _failure(command: Command, message: str, hint: str | None) -> Event:
    if isinstance(command, Pull):
        return PullFailed(command.name, message, hint)
    return Failed(command.id if isinstance(command, Generate) else None, message, hint)


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until its other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the chat's business
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    Server(Inbox(connection), Outlet(connection).send).serve()
