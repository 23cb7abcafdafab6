"""The control channel of ranks: proof of the key, heartbeats, lost peers, errors."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Queue
from typing import Any

import pytest

from headrace.runtime.errors import UsageError
from headrace.runtime.ranks import peer_connection
from headrace.runtime.ranks.follower import Follower
from headrace.runtime.ranks.leader import Leader, listen
from headrace.runtime.ranks.peer_connection import PeerConnection, RankLostError, connect
from headrace.runtime.ranks.split import Split
from tests.support.patience import PATIENCE_S

KEY = bytes(range(32))


class Pair:
    """A leader of two ranks. lost: errors of either; ends: exit codes of processes that would have ended."""

    def __init__(self) -> None:
        self.listener, self.lost, self.ends = listen("127.0.0.1"), Queue[RankLostError](), Queue[int]()
        self.address: tuple[str, int] = self.listener.getsockname()
        self.leader = Leader(self.listener, KEY, ["here", "there"], self.lost.put, self.ends.put)

        self.followers: list[Follower] = []

    def follow(self, key: bytes = KEY) -> Follower:
        self.followers.append(Follower(self.address, 1, key, PATIENCE_S, self.lost.put, self.ends.put))
        return self.followers[-1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    for follower in both.followers:
        follower.link.close()
    both.leader.close()
    both.listener.close()


def connected(pair: Pair) -> Follower:
    held = Queue[Follower]()
    threading.Thread(target=lambda: held.put(pair.follow())).start()
    pair.leader.accept(PATIENCE_S)
    return held.get(timeout=PATIENCE_S)


def test_records_arrive_in_order_and_the_end_is_no_loss(pair: Pair) -> None:
    follower = connected(pair)
    pair.leader.tell({"calls": [1]})
    pair.leader.tell({"calls": [2]})
    assert [follower.take(), follower.take()] == [{"calls": [1]}, {"calls": [2]}]
    follower.link.send({"found": 3})
    assert pair.leader.answers(PATIENCE_S) == [{"found": 3}]
    ending = threading.Thread(target=pair.leader.close)
    ending.start()
    assert follower.take() is None
    follower.link.close()
    ending.join(PATIENCE_S)
    assert pair.lost.empty()


def framed(text: str) -> bytes:
    return struct.pack("!I", len(text.encode())) + text.encode()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 1 << 30),
        b"\0\0\0\2[]",
        framed("[" * 1000),
        framed('{"rank":1,"proof":"\u00e9"}'),
    ],
)
def test_unknown_connections_are_ignored(pair: Pair, sent: bytes) -> None:
    with socket.create_connection(pair.address) as stranger:
        with suppress(OSError):  # refused by its first bytes, and hung up on already
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        connected(pair).link.close()


def test_silent_unknown_connections_delay_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "GREETING_S", 10 * PATIENCE_S)
    strangers = [socket.create_connection(pair.address) for _ in range(peer_connection.MAX_GREETED + 8)]
    connected(pair).link.close()
    for stranger in strangers:
        stranger.close()


def test_a_slow_unknown_connection_delays_nothing() -> None:
    here, there = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            there.sendall(struct.pack("!I", 1000))
            while not ended.wait(0.02):
                there.sendall(b" ")

    threading.Thread(target=drip, daemon=True).start()
    with here, there, pytest.raises(TimeoutError):
        peer_connection.accept(here, KEY, 0.2)
    ended.set()


@pytest.mark.parametrize("claimed", [0, 2, -1, "1", None])
def test_a_connection_without_the_key_or_of_no_rank_is_refused(pair: Pair, claimed: object) -> None:
    with socket.create_connection(pair.address, PATIENCE_S) as stranger:
        nonce = "0" * 64
        data = json.dumps({"rank": claimed, "nonce": nonce, "proof": "0" * 64}).encode()
        stranger.sendall(struct.pack("!I", len(data)) + data)
        while stranger.recv(1024):  # until it is hung up on
            pass
        with pytest.raises(RankLostError, match="there has not connected"):
            pair.leader.accept(0.1)


def test_a_leader_with_another_key_is_refused(pair: Pair) -> None:
    found = Queue[Exception]()

    def refuse() -> None:
        try:
            pair.follow(bytes(32))
        except RankLostError as error:
            found.put(error)

    threading.Thread(target=refuse).start()
    with pytest.raises(RankLostError, match="there has not connected"):
        pair.leader.accept(0.5)
    assert "refuses" in str(found.get(timeout=PATIENCE_S))


def test_a_follower_needs_a_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(RankLostError, match="rank 0"):
        connect(address, 1, KEY, PATIENCE_S)


def test_a_closed_connection_ends_both_ranks_and_names_the_lost_one(pair: Pair) -> None:
    follower = connected(pair)
    follower.link._socket.shutdown(socket.SHUT_RDWR)
    lost = {str(error): error.rank for error in (pair.lost.get(timeout=PATIENCE_S) for _ in range(2))}
    assert lost == {"there has closed the connection": 1, "rank 0 has closed the connection": None}
    assert [pair.ends.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 1]


def test_a_silent_rank_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "SILENCE_S", 0.2)
    monkeypatch.setattr(peer_connection, "BEAT_S", PATIENCE_S)
    connected(pair)
    assert "has not been heard of" in str(pair.lost.get(timeout=PATIENCE_S))


class _Meeting(threading.Event):
    """An event at which two threads look before either of them sets it, if they can."""

    def __init__(self) -> None:
        super().__init__()
        self._barrier = threading.Barrier(2)

    def is_set(self) -> bool:
        value = super().is_set()
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(0.1)
        return value


def test_a_loss_that_two_threads_notice_is_reported_once() -> None:
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as here:
        lost = Queue[str]()
        connection = PeerConnection(here, "there", lost.put)
        connection._closed = _Meeting()
        threads = [threading.Thread(target=connection._lose, args=(reason,)) for reason in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert lost.qsize() == 1


def test_a_close_while_a_record_is_read_ends_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as here:
        connection = PeerConnection(here, "there", lambda _reason: None)

        def close_first(*_: object) -> dict[str, object]:
            connection.close()
            return {"calls": [1]}

        monkeypatch.setattr(peer_connection, "receive_frame", close_first)
        connection.start()
        assert connection.take(PATIENCE_S) == {"calls": [1]}
        assert connection.take(PATIENCE_S) is None


@pytest.mark.parametrize("expected", [True, False])
def test_an_expected_end_is_no_loss(expected: bool) -> None:
    lost = list[str]()
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as here:
        connection = PeerConnection(here, "there", lost.append)
        if expected:
            connection.expect_end()
        listener.accept()[0].close()
        connection._read()  # to the end of the records
        assert connection.take(PATIENCE_S) is None
    assert lost == ([] if expected else ["has closed the connection"])


class _JoiningOther:
    """A connection during whose end another rank is accepted."""

    def __init__(self, links: dict[int, Any]) -> None:
        self._links = links

    def expect_end(self) -> None:
        self._links[3] = self

    def send(self, _record: dict[str, Any]) -> None:
        pass

    def wait_closed(self, _seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_loss_while_ranks_connect_ends_all(pair: Pair) -> None:
    links: dict[int, Any] = pair.leader._links
    links[2] = _JoiningOther(links)
    pair.leader.lose(1, "has closed the connection")
    assert pair.ends.get_nowait() == 1
    links.clear()


def test_an_error_of_a_follower_ends_all_with_its_text(pair: Pair) -> None:
    connected(pair).link.send({"error": "no such model here"})
    assert str(pair.lost.get(timeout=PATIENCE_S)) == "there failed: no such model here"
    assert pair.ends.get(timeout=PATIENCE_S) == 1


def test_layers_are_divided_over_ranks_in_proportion_to_their_shares() -> None:
    assert Split("pipeline", (1, 1)).ranges(5) == [range(2), range(2, 5)]
    assert Split("pipeline", (8, 1, 1)).ranges(3) == [range(1), range(1, 2), range(2, 3)]
    assert Split("pipeline", (1, 3)).ranges(8) == [range(2), range(2, 8)]
    for shares in ((), (1, 0), (1, -1)):
        with pytest.raises(UsageError):
            Split("tensor", shares).ranges(4)
    with pytest.raises(UsageError):
        Split("tensor", (1, 1, 1)).ranges(2)
