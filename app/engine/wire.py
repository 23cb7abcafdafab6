"""How messages cross the socket between the chat and its engine: the length in eight bytes, then the pickle.

Both ends are this program, started by the same user: what arrives is trusted, and pickles carry the messages' types.
(A benchmark's peers speak JSON lines, `app.bench.measure.child`: they run in a Python that has no headrace.) A stream
ends where it ends; what is left of a message that nobody finished is dropped.
"""

import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

CHUNK = 1 << 16  # bytes to ask the socket for at a time; for more, memory is mapped anew each time
_ROOM = 1 << 20  # bytes the socket should hold where the system allows it
_LENGTH = struct.Struct("!Q")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends with room for what comes while one of them is busy."""
    pair = socket.socketpair()
    for end in pair:
        for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):  # it has some room anyway
                end.setsockopt(socket.SOL_SOCKET, direction, _ROOM)
    return pair


def pack(message: object) -> bytes:
    """A message as it goes into the stream."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Takes the stream in whatever pieces it comes, gives whole messages."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """The messages that this piece completes, in order. Raises what unpickling raises."""
        self._pieces += piece
        messages: list[Any] = []
        start, head = 0, _LENGTH.size
        while len(self._pieces) - start >= head:
            (length,) = _LENGTH.unpack_from(self._pieces, start)
            end = start + head + length
            if len(self._pieces) < end:
                break
            with memoryview(self._pieces) as view:
                messages.append(pickle.loads(view[start + head : end]))
            start = end
        del self._pieces[:start]
        return messages
