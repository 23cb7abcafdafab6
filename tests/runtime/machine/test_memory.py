"""Memory budgets of recorded machines, and refusals with figures."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.machine import hardware, memory
from headrace.runtime.machine.memory import MemoryBudget, budget, check_fits

GIB = 2**30
LIMIT = MemoryBudget(total=16 * GIB, free=11 * GIB, reserve=GIB, source="available RAM")


def test_fits_up_to_the_last_byte() -> None:
    check_fits(6 * GIB, 3 * GIB, GIB, LIMIT)
    with pytest.raises(NotEnoughMemoryError):
        check_fits(6 * GIB, 3 * GIB, GIB + 1, LIMIT)


def test_models_are_not_refused_if_memory_is_unknown() -> None:
    check_fits(2**60, 0, 0, None)


def test_refusal_names_the_numbers_and_the_context_that_fits() -> None:
    with pytest.raises(NotEnoughMemoryError) as refused:
        check_fits(8 * GIB, 4 * GIB, GIB, LIMIT, context=32768, fitting=8192)
    message = str(refused.value)
    for part in ("13.0 GiB", "8.00 GiB", "4.00 GiB", "10.0 GiB", "32,768 tokens", "available RAM"):
        assert part in message
    assert "\n" not in message
    assert "8,192 tokens" in (refused.value.hint or "")


def test_weights_that_do_not_fit_are_refused_with_a_hint() -> None:
    with pytest.raises(NotEnoughMemoryError) as refused:
        check_fits(20 * GIB, GIB, 0, LIMIT, context=4096, fitting=0)
    assert refused.value.hint


def test_refusal_without_a_context() -> None:
    with pytest.raises(NotEnoughMemoryError) as refused:
        check_fits(8 * GIB, 4 * GIB, 0, LIMIT)
    assert "2.00 GiB" in (refused.value.hint or "")


def machine(backend: hardware.Backend, device_memory: int | None) -> hardware.Machine:
    return replace(hardware.machine(), backend=backend, memory_bytes=64 * GIB, device_memory_bytes=device_memory)


def test_the_budget_on_a_cpu_is_the_free_memory() -> None:
    limit = budget(machine("cpu", None), lambda: 20 * GIB)
    assert limit is not None
    assert (limit.total, limit.free, limit.source) == (64 * GIB, 20 * GIB, "available RAM")
    assert limit.usable == 20 * GIB - int(64 * GIB * 0.05)
    assert budget(machine("cpu", None), lambda: None) is None


def test_budget_never_goes_below_zero() -> None:
    limit = budget(machine("cpu", None), lambda: 1)
    assert limit is not None
    assert limit.usable == 0


def test_budget_within_an_address_space() -> None:
    host = replace(machine("cpu", None), usable_cores=2)
    limit = budget(host, lambda: 20 * GIB, lambda: (2 * GIB, GIB))
    assert limit is not None
    assert (limit.total, limit.free) == (2 * GIB, GIB)
    assert limit.usable == GIB - 7 * (72 << 20)  # the threads' stacks and heaps
    needed = f"{(GIB + 7 * (72 << 20) + 600 * 2**20) / GIB:.2f} GiB"
    with pytest.raises(NotEnoughMemoryError, match=re.escape(f"(ulimit -v) of 2.00 GiB is too small; {needed}")):
        check_fits(500 << 20, 60 << 20, 40 << 20, limit)
    assert budget(host, lambda: 1, lambda: (2 * GIB, GIB)) == budget(host, lambda: 1, lambda: None)  # the lower one
    on_metal = machine("metal", 48 * GIB)
    assert budget(on_metal, lambda: GIB, lambda: (GIB, 1)) == budget(on_metal, lambda: GIB, lambda: None)


def test_budget_on_metal_is_the_working_set() -> None:
    limit = budget(machine("metal", 48 * GIB), lambda: GIB)
    assert limit is not None
    assert limit.source == "recommended working set"
    assert limit.usable < 48 * GIB


def test_wiring_stays_well_below_the_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [0]
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: limits.append(limit) or limits[-2])
    host = machine("metal", 48 * GIB)
    with memory.wired(100 * GIB, 8 * GIB, host) as limit:
        assert limit == limits[-1] == 36 * GIB
    assert limits[-1] == 0
    with pytest.raises(KeyboardInterrupt), memory.wired(25 * GIB, 2 * GIB, host):
        raise KeyboardInterrupt
    assert limits == [0, 36 * GIB, 0, 27 * GIB, 0]


@pytest.mark.parametrize(
    ("backend", "device_memory", "weights", "switch"),
    [
        ("metal", 48 * GIB, 24 * GIB, ""),  # no more than half of the working set stays resident by itself
        ("metal", 48 * GIB, 30 * GIB, "0"),
        ("cuda", 48 * GIB, 40 * GIB, ""),
        ("cpu", None, 40 * GIB, ""),
    ],
)
def test_no_memory_is_wired_for_small_weights_other_devices_or_if_switched_off(
    backend: hardware.Backend, device_memory: int | None, weights: int, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("wired"))
    monkeypatch.setenv("HEADRACE_WIRED", switch)
    with memory.wired(weights, 8 * GIB, machine(backend, device_memory)) as limit:
        assert limit == 0


def test_only_the_memory_module_sets_the_wired_limit() -> None:
    root = Path(memory.__file__).parents[2]
    sources = [path for layer in ("app", "models", "runtime") for path in (root / layer).rglob("*.py")]
    callers = [path.name for path in sources if "set_wired_limit(" in path.read_text()]
    assert callers == ["memory.py"]


def test_loading_buffers_are_freed_at_once() -> None:
    before = mx.set_cache_limit(memory.CACHE_LIMIT)
    try:
        with memory.reading_weights():
            mx.eval(mx.zeros(4 * memory.LOADING_CACHE_LIMIT, mx.uint8))
            assert mx.get_cache_memory() <= memory.LOADING_CACHE_LIMIT
            mx.eval(mx.zeros(memory.LOADING_CACHE_LIMIT // 2, mx.uint8))
        assert mx.get_cache_memory() == 0
        assert mx.set_cache_limit(before) == memory.CACHE_LIMIT
    finally:
        mx.set_cache_limit(before)
