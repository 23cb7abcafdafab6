"""`bench compare` on simulated machines (see `simulated`): false alarms and missed slowdowns."""

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from headrace.app.bench.compare import checked, compare_documents
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.show.terminal_views import comparison_lines
from headrace.runtime.errors import UsageError
from tests.support.bench import repetition_figures
from tests.support.simulated_machine import document

TESTS = [Test(512, 0), Test(0, 128), Test(512, 128)]


def false_alarms(pairs: int, **options: float) -> float:
    """The share of comparisons of two runs of the same build in which any test is called different."""
    alarms = 0
    for i in range(pairs):
        found = compare_documents(document(2 * i, TESTS, **options), document(2 * i + 1, TESTS, **options))
        alarms += any(row.verdict in ("slower", "faster") for row in found.tests)
    return alarms / pairs


def test_two_runs_of_the_same_build_have_at_most_5_percent_false_alarms() -> None:
    assert false_alarms(40) <= 0.05


def test_equal_builds_come_out_equal_with_five_rounds() -> None:
    assert false_alarms(60, rounds=5) <= 0.05


@pytest.mark.sampled
@pytest.mark.parametrize("seconds", [3.0, 10.0])
def test_equal_builds_come_out_equal_where_noise_outlasts_a_round(seconds: float) -> None:
    assert false_alarms(30, seconds=seconds) <= 0.05


def test_a_slowdown_of_three_percent_is_found_at_the_default_repetitions() -> None:
    found = 0
    for i in range(25):
        rows = compare_documents(document(2 * i, TESTS), document(2 * i + 1, TESTS, slower=1.03)).tests
        found += all(row.verdict == "slower" for row in rows if row.test != "pp512")
    assert found >= 24


def test_a_slowdown_is_measured_without_bias() -> None:
    ratios = [
        compare_documents(document(2 * i, TESTS), document(2 * i + 1, TESTS, slower=1.1)).tests[1].ratio
        for i in range(20)
    ]
    assert sum(ratios) / 20 == pytest.approx(1 / 1.1, abs=0.005)


def test_differences_between_both_documents_are_named() -> None:
    a = document(1, TESTS[:2], rounds=2)
    b = document(2, TESTS[1:], rounds=2)
    b = replace(b, device=replace(b.device, name="another", measured_peak_gb_s=60.0))
    found = compare_documents(a, b)
    assert [row.test for row in found.tests] == ["tg128"]
    assert found.only_in_a == ["headrace simulated pp512"]
    assert found.only_in_b == ["headrace simulated pp512+tg128"]
    text = "\n".join(comparison_lines(found))
    assert "device: simulated and another" in text
    assert "only in A: headrace simulated pp512" in text
    assert "45.0 and 60.0 GB/s" in text


WRONG = [None, [], {}, "", "\ud800\x1b[31m", -1, 0, True, math.nan, math.inf, 1e300, 10**400, [None], [{}], {"a": 1}]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, of lists only into the first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from _places(part, (*path, key))


def test_an_edited_document_is_compared_or_refused() -> None:
    compared_with = document(1, TESTS[:1], rounds=3)
    whole = to_builtins(compared_with)
    refused = compared = 0
    for path in _places(whole):
        for wrong in (*WRONG, "missing"):
            edited = deepcopy(whole)
            parent = edited
            for key in path[:-1]:
                parent = parent[key]
            if wrong == "missing":
                del parent[path[-1]]
            else:
                parent[path[-1]] = wrong
            try:
                found = compare_documents(compared_with, checked(edited, "edited.json"))
            except UsageError as error:
                assert str(error).startswith("edited.json")  # noqa: PT017
                refused += 1
            else:
                compared += 1
                "\n".join(comparison_lines(found)).encode()
                json.dumps(to_builtins(found), allow_nan=False)
    assert refused > 100
    assert compared > 10


def test_an_interval_too_wide_gives_no_verdict() -> None:
    a = document(1, TESTS[:1], rounds=2)
    b = document(2, TESTS[:1], rounds=2)
    b = replace(b, results=[replace(b.results[0], repetitions=[repetition_figures(1.0), repetition_figures(1e9)])])
    found = compare_documents(a, b)
    (row,) = found.tests
    assert (row.verdict, row.ratio, row.low, row.high) == ("no result", None, None, None)
    assert "no result" in "\n".join(comparison_lines(found))


def test_one_repetition_is_reported_as_too_few() -> None:
    found = compare_documents(document(1, TESTS, rounds=1), document(2, TESTS, slower=3, rounds=1))
    assert {row.verdict for row in found.tests} == {"too few repetitions"}
