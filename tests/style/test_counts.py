"""Bounds on odd words and odd openings of docstrings. Lower one when the tree has got better."""

from pathlib import Path

import pytest

from tests.style.counts import Counts, comments, count, odd_openings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counts() -> Counts:
    return count(ROOT)


def test_at_most_two_odd_words_in_a_thousand(counts: Counts) -> None:
    assert counts.words > 10_000
    assert counts.odd_per_1000 <= 2


def test_no_docstring_opens_with_a_question_word(counts: Counts) -> None:
    assert counts.odd_openings == []


def test_docstrings_of_tests_open_plainly() -> None:
    assert odd_openings(ROOT / "tests") == []


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_odd_words_are_found(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "cache.py").write_text('"""What it is."""\n\na = 1  # who\n')
    counts = count(tmp_path)
    assert len(counts.odd_openings) == 1
    assert counts.odd_words == 2


def test_comments_are_told_from_strings() -> None:
    source = 'a = "# b" # c\nd = """\n# e\n"""  # f\ng = \'\\\'# h\' # i'
    assert comments(source) == ["# c", "# f", "# i"]
