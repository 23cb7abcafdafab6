"""Message format between the chat and its engine: the length in eight bytes, then the pickle.

Both ends are this program, run by the same user, so pickles are trusted. An incomplete message at the end of the stream
is dropped.
"""

import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

CHUNK = 1 << 16  # bytes per read; larger buffers are mapped anew each time
_BUFFER = 1 << 20  # bytes of socket buffer, if the system allows it
_LENGTH = struct.Struct("!Q")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets with large buffers."""
    pair = socket.socketpair()
    for end in pair:
        for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):  # the default has to do
                end.setsockopt(socket.SOL_SOCKET, direction, _BUFFER)
    return pair


def pack(message: object) -> bytes:
    """Encode a message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Decodes messages from a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """Return the messages that this piece completes, in order. Raises the errors of unpickling."""
        self._pieces += piece
        messages: list[Any] = []
        start = 0
        head = _LENGTH.size
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
