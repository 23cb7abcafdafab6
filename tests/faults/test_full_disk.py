"""Sessions, batch results, K/V, settings, presets and models on a full and on a failing disk."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.writers import WRITERS
from tests.support.patience import CAMPAIGN_S

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="limits and failing calls are those of Linux")
@pytest.mark.parametrize(("module", "step"), [("full_disk", "9001"), ("io_errors", "149")])
def test_confirmed_writes_survive_a_full_disk(tmp_path: Path, module: str, step: str) -> None:
    if module == "io_errors" and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    command = [sys.executable, "-m", f"tests.faults.{module}", str(tmp_path), step]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAMPAIGN_S, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(WRITERS), done.stderr
    for kind in found:
        assert (kind["foreign"], kind["wrong"]) == (0, []), done.stderr
        assert kind["done"] >= 1 or module == "io_errors"
        assert kind["failed"] >= 1 or kind["kind"] == "kv"
