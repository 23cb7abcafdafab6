"""Sessions, results of a batch, K/V, settings and models, on a disk that is full at every so many bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_what_was_promised_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.full_disk", str(tmp_path), "3001"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 5, done.stderr
    for kind in found:
        assert (kind["foreign"], kind["wrong"]) == (0, []), done.stderr
        assert kind["done"] >= 1
        assert kind["failed"] >= 1 or kind["kind"] == "kv"
