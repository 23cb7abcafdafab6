"""Two commands on one home at once: no lost, doubled or damaged data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import CAMPAIGN_S

ROOT = Path(__file__).resolve().parent.parent.parent
PAIRS = (  # in three parts
    ("first starts", "runs", "run, rm", "run, doctor"),
    ("doctors", "run, export", "settings", "pulls"),
    ("pull, rm", "batches"),
)


def test_all_pairs_of_concurrent_commands_are_in_a_part(tmp_path: Path) -> None:
    from tests.faults.pairs import pairs

    assert [name for part in PAIRS for name in part] == list(pairs(tmp_path))


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform == "win32", reason="needs forks")
@pytest.mark.parametrize("part", PAIRS, ids=lambda part: part[0])
def test_concurrent_commands_have_the_results_of_the_same_commands_alone(tmp_path: Path, part: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.faults.pairs", str(tmp_path), "1", *part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAMPAIGN_S, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [pair["pair"] for pair in found] == list(part), done.stderr
    assert [pair for pair in found if pair["wrong"]] == []
