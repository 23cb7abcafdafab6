"""Two commands on one home at once: no lost, doubled or damaged data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import CAMPAIGN_S

ROOT = Path(__file__).resolve().parent.parent.parent
PAIRS = 11


@pytest.mark.skipif(sys.platform == "win32", reason="needs forks")
def test_concurrent_commands_have_the_results_of_the_same_commands_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.pairs", str(tmp_path), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAMPAIGN_S, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == PAIRS, done.stderr
    assert [pair for pair in found if pair["wrong"]] == []
