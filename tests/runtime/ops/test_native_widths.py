"""Processor time of each width of weights, relative to 4 bits, on every instruction set; results never show it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from headrace.runtime import ops
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import native
from tests.bench.widths import product, random_weight, times_per_weight
from tests.support.kernels import INSTRUCTION_SETS, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
MAX_RATIO = 3.0
"""The bound of all widths but 3 bits: products are in integers, as for 4 bits, and ratios come to 0.7 to 2."""
MAX_RATIO_OF_3_BITS = {
    "avx512": {1: 6.0, 4: 5.0, 16: 3.5},
    "avx2": {1: 4.5, 4: 3.0, 16: 2.5},
    "portable": {1: 6.0, 4: 4.0, 16: 3.0},
}
"""By instruction set and rows: 1.4 times the highest ratio measured. Products are in float32."""
MAX_RATIO_ON_NEON = 9.0
"""The bound of all widths, not measured."""
ROUNDS = (9, 20, 60)
"""Rounds of each measurement: the next one follows if a ratio of the last one was too high. Programs on the other
hyperthread slow some rounds down; a width that really is too slow is so in the longest measurement, too."""


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def ratios_to_4_bits(kinds: Sequence[tuple[int, int]], rows: int, rounds: int) -> dict[tuple[int, int], float]:
    """Return the processor time of each kind of weights (bits and group size), relative to 4 bits."""
    runs = [product(random_weight(*kind), rows) for kind in [(4, 32), *kinds]]
    four_bits, *others = times_per_weight(runs, rounds=rounds, repeats=1)
    return {kind: time / four_bits for kind, time in zip(kinds, others, strict=True)}


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_no_width_is_much_slower_than_4_bits(instruction_set: str, rows: int) -> None:
    native.set_threads(1)
    kinds = [(2, 32), (3, 32), (5, 32), (6, 32), (6, 16), (8, 32)]
    limits = dict.fromkeys(kinds, MAX_RATIO_ON_NEON)
    if instruction_set != "neon":
        limits = {**dict.fromkeys(kinds, MAX_RATIO), (3, 32): MAX_RATIO_OF_3_BITS[instruction_set][rows]}
    for rounds in ROUNDS:
        ratios = ratios_to_4_bits(kinds, rows, rounds)
        too_slow = {kind: ratio for kind, ratio in ratios.items() if ratio > limits[kind]}
        if not too_slow:
            break
    assert not too_slow, ratios


def test_kernels_of_another_instruction_set_are_chosen_by_name() -> None:
    """In a process of its own, since they are chosen when the kernels are imported."""
    program = "from headrace.runtime import ops; ops.select(); print(ops.describe()['reason'])"
    for name in set(native.instruction_sets()) - {native.status().instruction_set}:
        environment = {**os.environ, "HEADRACE_KERNELS": name}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert f"built for this machine: {name}," in done.stdout, done.stderr


def test_instruction_sets_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = next(name for name in ("neon", "portable") if name not in native.instruction_sets())
    monkeypatch.setenv("HEADRACE_KERNELS", missing)
    with pytest.raises(UsageError, match=f"HEADRACE_KERNELS={missing}") as raised:
        ops.select()
    assert str(native.status().instruction_set) in str(raised.value.hint)
