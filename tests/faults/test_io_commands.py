"""Whole commands on a failing disk: no false success, and each can be run again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import CAMPAIGN_S

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="failing calls are those of Linux")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("step", "names"), [("53", ["run", "batch", "pull", "pull of parts"]), ("1", ["export over", "doctor", "settings"])]
)
def test_exit_code_0_only_for_complete_output(tmp_path: Path, step: str, names: list[str]) -> None:
    command = [sys.executable, "-m", "tests.faults.io_commands", str(tmp_path), step, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAMPAIGN_S, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(names), done.stderr
    for kind in found:
        assert kind["wrong"] == 0, kind
        assert kind["failed"] >= 1
