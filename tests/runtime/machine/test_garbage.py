"""No garbage is collected in a block of imports, whose objects are exempt from then on."""

import gc
from typing import Any

import pytest

from headrace.runtime.machine import garbage


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the exemptions instead of making them."""
    calls: list[int] = []
    monkeypatch.setattr(garbage, "_exempt", False)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    return calls


def test_nothing_is_collected_within_a_block(frozen: list[int]) -> None:
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
    assert frozen == [1]


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with garbage.importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
