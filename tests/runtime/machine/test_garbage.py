"""No garbage is collected in a block of imports, whose objects are exempt from then on; collections are timed."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.machine import garbage


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the exemptions instead of making them."""
    calls: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    return calls


def test_no_garbage_is_collected_while_importing() -> None:
    phases: list[str] = []

    def note(phase: str, _: Any) -> None:
        phases.append(phase)

    def block() -> list[list[int]]:
        with garbage.importing():
            kept = [[number] for number in range(100_000)]
            assert phases == []
            raise ValueError(len(kept))

    gc.callbacks.append(note)
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="100000"):
                block()
            phases.clear()
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_objects_of_imported_modules_are_exempt_from_collection(
    frozen: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second load of a model imports nothing, and the first model's objects have to stay collectable."""
    (tmp_path / "imported_in_a_block.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with garbage.importing():
            import imported_in_a_block  # type: ignore[import-not-found]
    assert imported_in_a_block.__name__ in sys.modules
    assert frozen == [1]
    del sys.modules["imported_in_a_block"]


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with garbage.importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_collection_is_timed_once_watched() -> None:
    garbage.watch_garbage()
    garbage.watch_garbage()
    before = garbage.garbage_seconds()
    gc.collect()
    assert garbage.garbage_seconds() > before
    assert gc.callbacks.count(garbage._note) == 1
