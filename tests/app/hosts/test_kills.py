"""Ranks that are killed, stopped or cut off, in each phase: all ranks end, and one line names the lost one."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.killed_hosts import PHASES, Run, kill_ranks
from tests.support.tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("hosts") / "tiny")


@pytest.fixture
def run(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    made: list[Run] = []

    def start(phase: str) -> Run:
        made.append(Run(model, phase))
        return made[-1].wait()

    yield start
    for one in made:
        one.close()


@pytest.mark.sampled
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_follower_ends_the_run(run: Callable[[str], Run], phase: str) -> None:
    it = run(phase)
    it.follower.send_signal(signal.SIGKILL)
    code, errors = it.ended()
    assert code == 1
    assert "rank 1 (localhost)" in errors
    assert "SIGKILL" in errors or phase == "join"
    assert it.no_orphan()
    assert not it.left_behind()


@pytest.mark.sampled
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_0_leaves_no_orphan(run: Callable[[str], Run], phase: str) -> None:
    it = run(phase)
    it.driver.kill()
    assert it.no_orphan()
    assert not it.left_behind()


@pytest.mark.sampled
@pytest.mark.parametrize("phase", ["start", "join", "decode"])
def test_a_stopped_follower_ends_the_run(run: Callable[[str], Run], phase: str) -> None:
    it = run(phase)
    it.follower.suspend()
    code, errors = it.ended()
    assert code == 1
    assert "rank 1 (localhost)" in errors
    assert it.no_orphan()


def test_a_stopped_follower_ends_with_a_killed_rank_0(run: Callable[[str], Run]) -> None:
    if sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG")
    it = run("idle")
    it.follower.suspend()
    it.driver.kill()
    assert it.no_orphan()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("phase", "named"), [("cut", "rank 1 (localhost)"), ("hang", "rank 1 (localhost) has not finished a pass")]
)
def test_a_closed_socket_or_an_endless_pass_ends_all_ranks(run: Callable[[str], Run], phase: str, named: str) -> None:
    """In an endless pass both ranks send heartbeats, and rank 0 waits in a sum in which the other takes no part."""
    it = run(phase)
    code, errors = it.ended()
    assert code == 1
    assert named in errors
    assert it.no_orphan()


@pytest.mark.nightly
def test_killed_ranks_leave_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    kill_ranks(tmp_path, 24, 0)
