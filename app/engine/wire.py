"""Messages between the chat or the server and its engine process: each is its length in eight bytes, then its pickle.

Both ends are this program, run by the same user, so pickles are trusted. An incomplete message at the end of the stream
is dropped.

Guard: tests/app/engine/test_link.py.
"""

import pickle
import socket
import struct
import time
from contextlib import suppress
from typing import Generic, TypeVar

_CHUNK = 1 << 16  # bytes per read; larger buffers are mapped anew each time
_BUFFER = 1 << 20  # bytes of socket buffer, if the system allows it
_LENGTH = struct.Struct("!Q")  # eight bytes, big-endian
Sent = TypeVar("Sent")
Received = TypeVar("Received")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets with large buffers."""
    pair = socket.socketpair()
    for end in pair:
        for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):  # the default has to do
                end.setsockopt(socket.SOL_SOCKET, direction, _BUFFER)
    return pair


class Channel(Generic[Sent, Received]):
    """One end of the stream of messages. One thread may send while another one receives.

    ended_at: monotonic time at which the stream was found to have ended; None until then.
    is_garbled: it ended at bytes that are no message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.ended_at: float | None = None
        self.is_garbled = False
        self._socket = connection
        self._outgoing = bytearray()
        self._incoming = bytearray()

    @property
    def descriptor(self) -> int | None:
        """The socket's file descriptor; None after the stream's end."""
        return None if self.ended_at is not None else self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if messages wait for room in the socket: the other process is busy or suspended."""
        return bool(self._outgoing)

    def send(self, message: Sent, *, waits: bool = False) -> None:
        """Queue a message, and `flush` it."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += _LENGTH.pack(len(body)) + body
        self.flush(waits=waits)

    def flush(self, *, waits: bool = False) -> None:
        """Send what is queued, as far as the socket takes it now, or wait until it has.

        After the stream's end, which `receive` finds, it is dropped.
        """
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing, flags)]  # `send` may take a part only
        except BlockingIOError:
            pass  # sent by the next call
        except OSError:
            self._outgoing.clear()

    def receive(self) -> list[Received]:
        """Return the messages that have arrived, in order."""
        try:
            while self.ended_at is None:
                piece = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
                self._incoming += piece
                if not piece:
                    self.end()
        except BlockingIOError:
            pass
        except OSError:  # the other process died with unread data
            self.end()
        messages: list[Received] = []
        start = 0
        head = _LENGTH.size
        while not self.is_garbled and len(self._incoming) >= start + head:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + head + length
            if len(self._incoming) < end:
                break
            try:
                # Unpickled in place. The view ends at once: a bytearray with a view cannot shrink, as below.
                with memoryview(self._incoming) as view:
                    messages.append(pickle.loads(view[start + head : end]))
            except Exception:
                self.is_garbled = True
                self.end()
            start = end
        del self._incoming[:start]  # the beginning of a message stays until the rest has come
        return messages

    def end(self) -> None:
        """Close the socket."""
        self.ended_at = time.monotonic()
        self._socket.close()
