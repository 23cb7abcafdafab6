"""Bounds on the counts: plain words, small functions, few cache classes. Lower one when the tree has got better."""

from pathlib import Path

import pytest

from tests.style.counts import Counts, count, odd_openings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counts() -> Counts:
    return count(ROOT)


def test_words(counts: Counts) -> None:
    assert counts.words > 10_000
    assert counts.odd_per_1000 <= 2


@pytest.mark.parametrize(
    ("places", "most"),
    [("odd_openings", 0), ("long_functions", 0), ("many_parameters", 3), ("cache_classes", 31), ("long_files", 9)],
)
def test_places(counts: Counts, places: str, most: int) -> None:
    found = getattr(counts, places)
    assert len(found) <= most, "\n".join(found)


def test_openings_of_tests() -> None:
    assert odd_openings(ROOT / "tests") == []


def test_lines(counts: Counts) -> None:
    assert 30_000 < counts.lines <= 76_200


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_places_are_found(tmp_path: Path) -> None:
    """Each kind of place is counted where a file has it."""
    (tmp_path / "app").mkdir()
    body = "\n".join("    a = 1" for _ in range(61))
    arguments = ", ".join(f"a{i}" for i in range(9))
    (tmp_path / "app" / "cache.py").write_text(
        f'"""What it is."""\n\n\nclass C:\n    """One."""\n\n\ndef f({arguments}):\n{body}  # who\n' + "# line\n" * 300
    )
    found = count(tmp_path)
    places = (found.odd_openings, found.cache_classes, found.long_functions, found.many_parameters, found.long_files)
    assert [len(each) for each in places] == [1, 1, 1, 1, 1]
    assert found.odd_words == 2
