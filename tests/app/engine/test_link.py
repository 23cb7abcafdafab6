"""The socket between the chat and its engine: messages cut anywhere, and a suspended process."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.events import Died, Done, Event, LoadProgress
from headrace.app.engine.link import EngineLink, _exit_message
from headrace.app.engine.process import EventSender
from headrace.app.engine.wire import Channel, socket_pair
from headrace.runtime.engine.request import Finished
from tests.support.deltas import delta
from tests.support.patience import PATIENCE_S
from tests.support.scripted_engine import record, summary

STUTTERING_ENGINE = Path(__file__).parents[2] / "support" / "stuttering_engine.py"
MESSAGES = st.lists(
    st.one_of(st.text(), st.binary(max_size=300), st.integers(), st.tuples(st.text(), st.none())), max_size=20
)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLink]:
    """A link to a stuttering engine."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr("headrace.app.engine.link._START", STUTTERING_ENGINE)
    monkeypatch.setattr("headrace.app.engine.link._GRACE_S", PATIENCE_S)  # an interpreter that ends can take its time
    link = EngineLink()
    told(link, "say 1")
    assert drained(link, 1) == [LoadProgress("saying", 0, None)]
    yield link
    link.kill()


def told(link: EngineLink, what: str) -> None:
    link.send(ModelSpec(what))


def drained(link: EngineLink, count: int) -> list[Event]:
    """Return the next `count` events."""
    events: list[Event] = []
    eventually(lambda: len(events) >= count or bool(events.extend(link.drain())))
    return events


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def packed(messages: list[Any]) -> bytes:
    """Return the bytes that a channel sends."""
    ours, theirs = socket_pair()
    with ours, theirs:
        channel = Channel[Any, Any](ours)
        for message in messages:
            channel.send(message)
        return theirs.recv(1 << 20) if messages else b""


@given(MESSAGES, st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(messages: list[Any], data: st.DataObject) -> None:
    stream = packed(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    ours, theirs = socket_pair()
    channel = Channel[Any, Any](theirs)
    seen: list[Any] = []
    with ours, theirs:
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            ours.sendall(stream[start:end])
            seen += channel.receive()
        assert channel.ended_at is None
    assert seen == messages


@given(MESSAGES.filter(bool), st.data())
def test_an_incomplete_message_is_not_delivered(messages: list[Any], data: st.DataObject) -> None:
    stream = packed(messages)
    last = len(packed(messages[-1:]))
    ours, theirs = socket_pair()
    with theirs:
        with ours:
            ours.sendall(stream[: len(stream) - data.draw(st.integers(1, last))])
        channel = Channel[Any, Any](theirs)
        assert channel.receive() == messages[:-1]
        assert channel.ended_at is not None
        assert not channel.is_garbled


def test_messages_before_garbage_bytes_are_delivered() -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        ours.sendall(packed(["first"]) + b"\0" * 7 + b"\1x" + packed(["behind"]))
        channel = Channel[Any, Any](theirs)
        assert channel.receive() == ["first"]
        assert channel.is_garbled
        assert channel.receive() == []


def test_many_messages_at_once_and_one_that_fills_the_socket_many_times(link: EngineLink) -> None:
    told(link, "say 5000")
    assert drained(link, 5000) == [LoadProgress("saying", i, None) for i in range(5000)]
    told(link, "half 5000000")
    told(link, "rest")
    assert drained(link, 1) == [LoadProgress("x" * 5_000_000, 0, None)]


def test_a_message_received_in_two_halves_is_delivered_whole(link: EngineLink) -> None:
    told(link, "half 1000")
    told(link, "say 0")
    for _ in range(20):
        assert link.drain() == []
        time.sleep(0.005)
    told(link, "rest")
    assert drained(link, 1) == [LoadProgress("x" * 1000, 0, None)]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_a_process_stopped_in_mid_message_blocks_nothing(link: EngineLink) -> None:
    told(link, "say 2")
    told(link, "half 100")
    told(link, "stop")
    eventually(lambda: state(link.pid) == "T")
    assert link.drain() == [LoadProgress("saying", 0, None), LoadProgress("saying", 1, None)]
    assert link.drain() == []
    told(link, "rest")
    os.kill(link.pid, signal.SIGCONT)
    assert drained(link, 1) == [LoadProgress("x" * 100, 0, None)]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_a_long_command_to_a_stopped_process_blocks_nothing(link: EngineLink) -> None:
    told(link, "stop")
    eventually(lambda: state(link.pid) == "T")
    waker = threading.Timer(2.0, os.kill, (link.pid, signal.SIGCONT))  # for a sender that waits
    waker.start()
    told(link, "say 1" + " " * 5_000_000)
    told(link, "say 2")
    assert state(link.pid) == "T"
    assert link.has_unsent
    assert link.drain() == []
    waker.join()
    assert drained(link, 3) == [LoadProgress("saying", i, None) for i in (0, 0, 1)]
    assert not link.has_unsent


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_a_stopped_process_with_a_long_command_is_left_in_time(link: EngineLink) -> None:
    told(link, "stop")
    eventually(lambda: state(link.pid) == "T")
    told(link, "say 1" + " " * 5_000_000)
    link.quit(0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(link.pid, 0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "exit_message"),
    [
        ("die", "killed (SIGKILL)"),
        ("leave", "exit code 3"),
        ("lose", "rank 1 (mac2) has closed the connection"),
        ("starve", "the engine's memory ran out; use a shorter context"),
        ("abort", "crashed (SIGABRT)"),
    ],
)
def test_messages_before_a_crash_are_delivered(link: EngineLink, how: str, exit_message: str) -> None:
    told(link, "say 3")
    told(link, "half 100")
    told(link, how)
    *said, died = drained(link, 4)
    assert said == [LoadProgress("saying", i, None) for i in range(3)]
    assert isinstance(died, Died)
    assert exit_message in died.message
    told(link, "say 1")  # to nobody
    assert link.drain() == []


def test_messages_of_a_killed_process_are_delivered(link: EngineLink) -> None:
    told(link, "say 3")
    told(link, "half 100")
    eventually(lambda: link._socket.recv(1 << 16, socket.MSG_PEEK).count(b"saying") == 3)
    link.kill()
    said = link.drain()
    assert said == [LoadProgress("saying", i, None) for i in range(3)]
    with pytest.raises(ProcessLookupError):
        os.kill(link.pid, 0)
    assert link.drain() == []


def test_garbage_bytes_end_the_engine_process(link: EngineLink) -> None:
    link._incoming += b"\0" * 7 + b"\x01"  # a length of one, and what comes next is no pickle
    told(link, "say 1")
    (died,) = drained(link, 1)
    assert isinstance(died, Died)
    assert "invalid data" in died.message


def test_a_process_that_hangs_up_and_stays_did_not_run_out_of_memory(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.app.engine.link._GRACE_S", 0.05)
    told(link, "hang up")
    (died,) = drained(link, 1)
    assert isinstance(died, Died)
    assert "did not exit" in died.message
    assert "memory" not in died.message


def test_an_answer_does_not_wait_for_a_blocked_reader() -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        ended: list[int] = []
        outlet = EventSender(Channel(theirs), ended.append)
        deltas = [delta(1, f"{number} " * 200, (record(number, number + 1),)) for number in range(4000)]
        for sent in deltas:  # far more than a socket holds
            outlet.send(sent)
        done = Done(1, Finished("stop", summary(10, 0, 4000)))
        incoming = Channel[Any, Event](ours)
        seen = list[Event]()
        while len(seen) < len(deltas):
            arrived = incoming.receive()
            seen += arrived
            if not arrived:
                outlet.send(delta(1))  # the next one takes along what waits
                deltas.append(delta(1))
        outlet.send(done)
        while done not in seen:
            seen += incoming.receive()
        assert seen == [*deltas, done]
        assert ended == [1]


def test_a_lost_rank_is_found_in_the_middle_of_another_line() -> None:
    log = "[ring] Socket 5headrace: rank 1 (mac2) has closed the connection\n  hint: start again\n[ring] Failing\n"
    assert _exit_message(1, log, "") == "rank 1 (mac2) has closed the connection; this machine goes on alone"
    assert "exit code 1" in _exit_message(1, "[ring] Failing\n", "")
