"""Connections of the control channel: proof of the key, records both ways, heartbeats, and detection of a lost peer.

A frame is a length (4 bytes, big-endian) and JSON. Both ends prove that they have the run's key: each answers the
other's random nonce with an HMAC (RFC 2104) before any record is read. A listening socket greets each connection on a
thread, so silent strangers delay no rank.

    rank 0       {"nonce": n}                                  (`accept`)
    rank r       {"rank": r, "nonce": m, "proof": of "n r"}    (`connect`)
    rank 0       {"proof": of "m 0"}
    then both    {} heartbeat; {"times": s}; {"error": text}; any other record is for `take`

Rank 0 sends {"calls": [...]}, {"end": reason} (`runtime.ranks.leader`) and the model to load
(`models/loading/ranked.py`). A follower answers some calls (`runtime.ranks.follower`) with {"marks": bool},
{"found": entries} or {"cleared": true}, and the model to load with {"found": true}, then {"context": ..., "fitting":
...} (`models/loading/ranked.py`). tests/runtime/ranks/test_peer_connection.py guards this.
"""

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from headrace.runtime.errors import EngineError

SILENCE_S = 5.0  # without a heartbeat a peer is lost
BEAT_S = 1.0  # between heartbeats
GREETING_S = 2.0  # that a connection gets to prove its key
MAX_GREETED = 32  # connections greeted at a time, a thread each: far more than ranks; one more ends the oldest
FAILED = "failed:"  # beginning of the reason if a rank has sent an error, and is not lost
_LEAST_S = 0.01  # of a socket's timeout, as 0 would not wait at all
_LOOK_S = 0.2  # wait for a connection, before looking whether to end
_HANDSHAKE_BYTES = 1 << 10  # of a message before the proof; those in use have about 200
_RECORD_BYTES = 1 << 28  # of a message after it: the tokens of a step's prompts, with room
Record = dict[str, Any]


class RankLostError(EngineError):
    """A rank that ended, hangs, or cannot be reached; it is named."""

    def __init__(self, message: str, hint: str | None = None, rank: int | None = None) -> None:
        """rank: of the lost one, if rank 0 knows it."""
        super().__init__(message, hint)
        self.rank = rank


class PeerConnection:
    """A connection to the peer `name`, from the proof of its key on.

    on_lost(reason): called at most once, by any thread; `_losing` lets one of them alone end the use.

        open    records are sent and taken          `close`, or any failure of the socket, ends this
        lost    `take` returns what came, then None; `on_lost` was called, and `close` still closes the socket
        closed  the same, by `close` first: nothing is reported

    `_closed` is set in the last two. After `expect_end` a failure is no loss, either. A loss that was noticed before
    `close` may still be reported after it.
    """

    def __init__(self, connection: socket.socket, name: str, on_lost: Callable[[str], None]) -> None:
        self.name = name
        self.times: float | None = None  # seconds in the peer's kernels of a recent decode pass; set by the reader
        self._socket = connection
        self._on_lost = on_lost
        self._sending = threading.Lock()  # heartbeats come between records, never into one
        self._losing = threading.Lock()
        self._records: SimpleQueue[Record | None] = SimpleQueue()  # from the reader to `take`; None: no more come
        self._closed = threading.Event()
        connection.settimeout(SILENCE_S)  # of each call; the handshake has left its own
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        """Start heartbeats, and the threads that watch for the peer's."""
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=f"{target.__name__.strip('_')} {self.name}", daemon=True).start()

    def send(self, record: Record) -> None:
        """Send a record. A peer that takes none is lost."""
        try:
            with self._sending:
                send_frame(self._socket, record)
        except TimeoutError:
            self._lose("takes no messages")
        except OSError:
            self._lose("has closed the connection")

    def take(self, timeout: float | None = None) -> Record | None:
        """Return the next record; None once the connection is closed. Raises RankLostError after `timeout` seconds."""
        try:
            return self._records.get(timeout=timeout)
        except Empty:
            raise RankLostError(f"{self.name} has not answered in {timeout:.0f} s") from None

    def close(self) -> None:
        """Close the connection; nothing is lost by that."""
        self._closed.set()  # first, so that threads which see the socket fail report no loss
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread in `recv`, which `close` alone does not
        self._socket.close()

    def wait_closed(self, seconds: float) -> None:
        """Wait until the peer has closed the connection."""
        self._closed.wait(seconds)

    def expect_end(self) -> None:
        """Take a closed connection as the end, not as a loss."""
        self._on_lost = lambda _reason: None

    def _read(self) -> None:
        """Take in the peer's records until the connection ends. Each receive waits at most SILENCE_S."""
        try:
            while not self._closed.is_set():
                record = receive_frame(self._socket, _RECORD_BYTES)
                if "times" in record:
                    self.times = record["times"]
                elif "error" in record:
                    self._lose(f"{FAILED} {record['error']}")
                elif record:  # else a heartbeat
                    self._records.put(record)
        except TimeoutError:
            self._lose(f"has not been heard of for {SILENCE_S:.0f} s")
        except (OSError, ValueError):
            self._lose("has closed the connection")
        finally:  # `close` may have come while a record was handled
            self._records.put(None)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.send({})

    def _lose(self, reason: str) -> None:
        """End the use of the connection, and call `on_lost` unless it had ended before.

        The socket stays open until `close`, since another thread may be in a call on it.
        """
        with self._losing:  # readers and senders may notice the loss at the same time
            closed = self._closed.is_set()
            self._closed.set()
        self._records.put(None)  # before `on_lost`, which may take long: `take` waits no more
        if not closed:
            self._on_lost(reason)


class Reception:
    """Greets those who connect to a listening socket, until `close`, which closes that socket, too."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener = listener
        self._key = key
        self._greeted: list[socket.socket] = []  # oldest first; the accepting thread adds, greeting threads remove
        self._proven: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        self._closed = threading.Event()
        listener.settimeout(_LOOK_S)  # `close` does not wake a thread in `accept`
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
        """Greet each connection on a thread of its own, until `close`."""
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or no descriptor is free
                time.sleep(_LOOK_S)
                continue
            self._greeted.append(connection)
            if len(self._greeted) > MAX_GREETED:
                # Its thread's `recv` ends, and the thread closes it. It may end by itself at this moment.
                with suppress(OSError, IndexError):
                    self._greeted[0].shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection,), name="greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Pass a connection on if it proves the key; else close it."""
        try:
            self._proven.put((accept(connection, self._key, GREETING_S), connection))
        except (OSError, ValueError, RankLostError):
            connection.close()
        finally:
            self._greeted.remove(connection)


def connect(address: tuple[str, int], rank: int, key: bytes, timeout: float) -> socket.socket:
    """Return a connection of rank `rank` to rank 0. Raises RankLostError if it is not there or has another key."""
    host, port = address
    at = f"rank 0 at {host}:{port}"
    try:
        connection = socket.create_connection(address, timeout)
    except OSError as error:
        raise RankLostError(f"{at} cannot be reached: {error}") from error
    try:
        # Rank 0 speaks first. Each end's proof has the nonce of the other in it, so a recorded one proves nothing; and
        # the rank, so neither end can send a proof back as its own.
        until = time.monotonic() + timeout
        greeting = receive_frame(connection, _HANDSHAKE_BYTES, until)
        nonce = secrets.token_hex(32)
        send_frame(connection, {"rank": rank, "nonce": nonce, "proof": _proof(key, f"{greeting['nonce']} {rank}")})
        answer = receive_frame(connection, _HANDSHAKE_BYTES, until)
        if not _proves(answer, key, f"{nonce} 0"):
            raise ValueError("it has another key")
    except (OSError, ValueError, KeyError) as error:
        connection.close()
        raise RankLostError(f"{at} refuses this rank: {error}") from error
    return connection


def accept(connection: socket.socket, key: bytes, timeout: float) -> int:
    """Return the rank that connected. Raises RankLostError without the key, and OSError.

    timeout: seconds for all of it, so that a stranger who sends byte by byte holds nothing up.
    """
    connection.settimeout(timeout)
    until = time.monotonic() + timeout
    nonce = secrets.token_hex(32)
    send_frame(connection, {"nonce": nonce})
    answer = receive_frame(connection, _HANDSHAKE_BYTES, until)
    rank = answer.get("rank")
    if not isinstance(rank, int) or not _proves(answer, key, f"{nonce} {rank}"):
        raise RankLostError("a connection without the run's key was refused")
    send_frame(connection, {"proof": _proof(key, f"{answer.get('nonce')} 0")})
    return rank


def send_frame(connection: socket.socket, record: Record) -> None:
    """Send one record."""
    data = json.dumps(record, separators=(",", ":")).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive_frame(connection: socket.socket, max_bytes: int, until: float | None = None) -> Record:
    """Return one record. until: monotonic clock. Raises ValueError for anything else, OSError at the end."""
    [size] = struct.unpack("!I", _receive(connection, 4, until))
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes")
    try:
        record = json.loads(_receive(connection, size, until))
    except RecursionError:
        raise ValueError("a message of too many levels") from None
    if not isinstance(record, dict):
        raise ValueError("a message that is no object")
    return record


def _receive(connection: socket.socket, size: int, until: float | None) -> bytes:
    """Return exactly `size` bytes. Raises TimeoutError after `until`, ConnectionError at the end."""
    received = bytearray()
    while len(received) < size:
        if until is not None:
            connection.settimeout(max(_LEAST_S, until - time.monotonic()))
            if time.monotonic() > until:
                raise TimeoutError("too slow")
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("closed")
        received += part
    return bytes(received)


def _proves(answer: Record, key: bytes, text: str) -> bool:
    """Return whether a peer's proof is that of the text by the run's key."""
    return hmac.compare_digest(str(answer.get("proof")).encode(), _proof(key, text).encode())


def _proof(key: bytes, text: str) -> str:
    """Return the HMAC of a text, which has the other end's nonce and the rank."""
    return hmac.new(key, text.encode(), "sha256").hexdigest()
