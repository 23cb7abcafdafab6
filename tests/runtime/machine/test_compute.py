"""Compute speed is measured with the active kernels, and the best value is stored."""

from pathlib import Path

import pytest

from headrace.runtime.machine import compute


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path / "cache" / "compute.json"


def test_the_best_measurement_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute.cached_compute() is None
    assert compute.measure_compute() == compute.cached_compute()
    for rate, best in ((1e15, 1e15), (1e14, 1e15)):
        monkeypatch.setattr(compute, "_measure", lambda _, rate=rate: rate)
        assert compute.measure_compute() == rate
        assert compute.cached_compute() == best


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"%s": -1.0}', '{"%s": "fast"}', '{"%s": NaN}', '{"%s": Infinity}']
)
def test_a_broken_file_reads_as_never_measured(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(content.replace("%s", compute._key()))
    assert compute.cached_compute() is None
