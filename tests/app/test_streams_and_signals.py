"""The command as a process among others: closed and full streams, signals at awkward moments. Tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat")


def shell(redirection: str, model: Path, home: Path, *more: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "app", "run", "hi", "-m", str(model), "-n", "4", *more]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_good_as_the_null_device(redirection: str, model: Path, tmp_path: Path) -> None:
    done = shell(redirection, model, tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (">&- 2" not in redirection and redirection != ">&-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_answer_that_cannot_be_written_is_one_line(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    done = shell("> /dev/full", model, tmp_path, *more)
    assert done.returncode == 1
    assert done.stderr == b"headrace: cannot write the output: No space left on device\n"
