"""SIGKILLs of writers in the middle of appending and folding: nothing lost, nothing stored twice."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_no_kill_doubles_or_loses_a_piece(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.fold_kills", str(tmp_path / "sessions.db"), "16", "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert re.fullmatch(r"25 kills, \d+ while folding, 0 answers wrong\n", done.stdout), done.stdout + done.stderr
