"""Processor time of each width of weights, relative to 4 bits, on every instruction set; results never show it."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.runtime import ops
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import native
from tests.bench.widths import product, random_weight, times_per_weight
from tests.support.kernels import INSTRUCTION_SETS, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
MAX_RATIO = {
    "avx512": {1: 7, 4: 4.5, 16: 4},
    "avx2": {1: 7, 4: 3.5, 16: 2.5},
    "neon": {1: 9, 4: 9, 16: 9},
    "portable": {1: 6.5, 4: 4.5, 16: 2.5},
}
"""By instruction set and rows: 2.5, or 1.4 times what was measured (docs/kernels.md); neon is not measured."""


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_no_width_is_much_slower_than_4_bits(instruction_set: str, rows: int) -> None:
    native.set_threads(1)
    kinds = [(4, 32), (2, 32), (3, 32), (5, 32), (6, 32), (6, 16), (8, 32)]
    runs = [product(random_weight(*kind), rows) for kind in kinds]
    four_bits, *others = times_per_weight(runs, rounds=9, repeats=1)
    ratios = {kind: time / four_bits for kind, time in zip(kinds[1:], others, strict=True)}
    assert max(ratios.values()) < MAX_RATIO[instruction_set][rows], ratios


def test_kernels_of_another_instruction_set_are_chosen_by_name() -> None:
    """In a process of its own, since they are chosen when the kernels are imported."""
    program = "from headrace.runtime import ops; ops.select(); print(ops.describe()['reason'])"
    for name in set(native.instruction_sets()) - {native.status().instruction_set}:
        environment = {**os.environ, "HEADRACE_KERNELS": name}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert f"built for this machine: {name}," in done.stdout, done.stderr


def test_instruction_sets_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = next(name for name in ("neon", "portable") if name not in native.instruction_sets())
    monkeypatch.setenv("HEADRACE_KERNELS", missing)
    with pytest.raises(UsageError, match=f"HEADRACE_KERNELS={missing}") as raised:
        ops.select()
    assert str(native.status().instruction_set) in str(raised.value.hint)
