"""The fuzzing driver finds all kinds of problems, keeps their inputs and continues after deaths."""

import sys
from pathlib import Path

import pytest

from tests.fuzz.driver import fuzz
from tests.fuzz.mutate import VALUES, mutated_value
from tests.fuzz.target import BROKEN, chance_of
from tests.support.patience import PATIENCE_S


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_every_kind_of_problem_is_found(tmp_path: Path) -> None:
    for seconds in (4, 8, PATIENCE_S):  # longer on a busy machine
        (report,) = fuzz([BROKEN], seed=1, seconds=seconds, jobs=1, saved=tmp_path)
        if len(report.problems) >= 5 and report.inputs > 20:
            break
    found = " ".join(report.problems)
    for words in ("HeadraceError", "KeyError", "the process ended with -N", "it took N MB of memory", "SystemExit"):
        assert words in found, found
    assert len(report.problems) == 5, report.problems
    assert report.inputs > 20
    saved = [path.read_text() for path in tmp_path.iterdir()]
    assert len(saved) > 5
    assert all(text.startswith(f"python -m tests.fuzz {BROKEN} --seed 1 --only ") for text in saved)


def test_a_document_depends_on_its_number_only() -> None:
    before = repr(VALUES)
    for number in range(300):
        chance = chance_of("document", 1, number)
        document = {"a": [1, {"b": {}}]}
        for _ in range(3):  # a part that was put in is a place for the next change
            document = mutated_value(chance, document, changes=5)
    assert repr(VALUES) == before
