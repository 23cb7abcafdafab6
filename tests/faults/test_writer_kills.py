"""SIGKILLs of session writers: no unreadable, lost or doubled text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.writer_kills import in_order
from tests.support.patience import CAMPAIGN_S

ROOT = Path(__file__).resolve().parent.parent.parent


def test_chats_killed_while_they_write_lose_and_double_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.writer_kills", str(tmp_path / "sessions.db"), "1", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAMPAIGN_S, check=False)
    assert done.returncode == 0, done.stderr
    promises, answers = map(int, done.stdout.split())
    assert promises > 30
    assert answers > 8


@pytest.mark.parametrize("answer", ["40 a 40 a 41 b", "41 b", "40 a 42 c", "80 a 40 a"])
def test_lost_and_doubled_pieces_are_detected(answer: str) -> None:
    assert in_order("40 a 41 b 80 c")
    assert not in_order(answer)


def test_no_kill_doubles_or_loses_a_piece(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.fold_kills", str(tmp_path / "sessions.db"), "16", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAMPAIGN_S, check=False)
    assert re.fullmatch(r"12 kills, \d+ while folding, 0 answers wrong\n", done.stdout), done.stdout + done.stderr
