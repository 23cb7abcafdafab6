"""`headrace run` on a terminal: one line about an answer that repeats itself. Tiny model."""

from pathlib import Path

import pexpect
import pytest

from headrace.app.answer.repetition import REPEATS
from tests.support.terminal import spawn_headrace
from tests.support.tiny_chat import write_chat_model


@pytest.mark.sampled
@pytest.mark.parametrize("quiet", [False, True])
def test_a_loop_is_one_line_on_a_terminal(quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_chat_model(tmp_path / "tiny")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    options = ["-n", "700", "-t", "0", "--logit-bias", "66=1000", *(["-q"] if quiet else [])]
    child = spawn_headrace("run", "hi", "-m", str(model), *options, dimensions=(24, 200))
    child.expect(pexpect.EOF)
    child.close()
    output = str(child.before)
    assert child.exitstatus == 0
    assert output.count(f"{REPEATS}; Ctrl-C ends it") == (0 if quiet else 1)
    assert "larger models do this less" in REPEATS
    assert "c" * 100 in output
