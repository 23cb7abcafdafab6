"""Connections to a listening socket that prove the run's key.

Each connection is greeted on a thread of its own, so silent strangers delay no rank.
"""

import socket
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from headrace.runtime.ranks.link import RankLostError, accept

GREETING_S = 2.0  # that a connection gets to prove its key
MOST = 32  # connections greeted at a time; one more ends the oldest
_LOOK_S = 0.2


class Reception:
    """Greets connections until `close`, which closes the listening socket, too."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener = listener
        self._key = key
        self._greeted: list[socket.socket] = []
        self._proven: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        self._closed = threading.Event()
        listener.settimeout(_LOOK_S)
        threading.Thread(target=self._accept, name="reception", daemon=True).start()

    def take(self, timeout: float) -> tuple[int, socket.socket] | None:
        """Return the rank and connection of the next peer with the key; None after `timeout` seconds."""
        with suppress(Empty):
            return self._proven.get(timeout=max(0.0, timeout))
        return None

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or no descriptor is free
                time.sleep(_LOOK_S)
                continue
            self._greeted.append(connection)
            if len(self._greeted) > MOST:
                with suppress(OSError, IndexError):
                    self._greeted[0].shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection,), name="greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._proven.put((accept(connection, self._key, GREETING_S), connection))
        except (OSError, ValueError, RankLostError):
            connection.close()
        finally:
            self._greeted.remove(connection)
