"""Latency and bandwidth of the link between rank 0 and another rank, by a small exchange over TCP.

`start.py` measures before it chooses the split, and `rank.py` answers. It takes a quarter of a second at most. RDMA is
not measured by it. Rank 0's messages begin with a byte for their kind; the other rank answers each but the last with
one byte.

Guard: tests/app/hosts/test_start.py.
"""

import socket
import time
from statistics import median

from msgspec import Struct

# Kinds of messages
_ROUND_TRIP = b"\0"  # that byte alone
_PIECE_OF_DATA = b"\1"  # _PIECE bytes in all
_END = b"\2"
_ANSWER = b"\0"
_ROUNDS = 15  # round trips
_PIECE = 4 << 20  # bytes
_PIECES = 16  # at most
_LONGEST_S = 0.2  # for all pieces
_TIMEOUT_S = 5.0  # for one message


class LinkSpeed(Struct, frozen=True):
    """latency_s: half a round trip, median. bytes_per_second: of one direction."""

    latency_s: float
    bytes_per_second: float


def measure_link(connection: socket.socket) -> LinkSpeed:
    """Measure the link to a peer in `answer_probe`. Raises OSError."""
    _prepare(connection)
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        connection.sendall(_ROUND_TRIP)
        _receive(connection, 1)
        rounds.append(time.perf_counter() - began)
    piece = _PIECE_OF_DATA + bytes(_PIECE - 1)
    sent = 0
    began = time.perf_counter()
    while sent < _PIECES and time.perf_counter() - began < _LONGEST_S:
        connection.sendall(piece)
        _receive(connection, 1)
        sent += 1
    seconds = time.perf_counter() - began
    connection.sendall(_END)
    round_trip = median(rounds)
    # Each piece waits for its answer; without that wait it is the time of the bytes alone. A tenth is left at least.
    transfer_s = max(seconds - sent * round_trip, seconds / 10)
    return LinkSpeed(round_trip / 2, sent * _PIECE / transfer_s)


def answer_probe(connection: socket.socket) -> None:
    """Answer a peer in `measure_link` until it ends. Raises OSError."""
    _prepare(connection)
    while (kind := _receive(connection, 1)) != _END:
        if kind == _PIECE_OF_DATA:
            _receive(connection, _PIECE - 1)
        connection.sendall(_ANSWER)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, and return the first."""
    buffer = bytearray(size)
    rest = memoryview(buffer)
    while rest:
        if not (count := connection.recv_into(rest)):
            raise ConnectionError("the connection was closed")
        rest = rest[count:]
    return bytes(buffer[:1])
