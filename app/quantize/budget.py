"""Budgets of a quantization: bits a weight, memory, or speed on a chip, as bytes of weights.

`quantize.py` turns each into a bound on bytes: bits directly, memory through `bytes_in_memory`, a speed by a search
with `predicted_speed` and `largest_that_holds`.

Guards: tests/app/quantize/test_mixtures.py and test_quantize.py.
"""

import re
from collections.abc import Callable

from msgspec import Struct

from headrace.app.model_info.model_report import MEMORY_CONTEXT
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.prediction import TargetMachine, step_seconds
from headrace.models.cost.costs import working_memory
from headrace.models.cost.step_shape import StepShape
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.cost import step_limit
from headrace.runtime.metrics.units import format_bytes

_UNITS = {"": 10**9, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
# "12GB", "800 MB", "12" (GB); "30 tok/s", "30".
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[MG]i?B)", re.IGNORECASE)
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*(?:|tok/s|t/s|tokens/s)", re.IGNORECASE)


class QuantizationBudget(Struct, frozen=True):
    """A budget of bits, memory or speed; exactly one of them is set."""

    bits: float | None = None
    memory_bytes: int | None = None
    tokens_per_second: float | None = None

    def describe(self) -> str:
        if self.bits is not None:
            return f"{self.bits:g} bits a weight"
        if self.memory_bytes is not None:
            return f"{format_bytes(self.memory_bytes)} of memory"
        return f"{self.tokens_per_second:g} tok/s"


def parse_budget(bits: float | None, memory: str | None, speed: str | None) -> QuantizationBudget:
    """Return the budget of the options. Raises UsageError unless exactly one of them is valid."""
    options = {"--bits": bits, "--memory": memory, "--at-least": speed}
    given = [name for name, value in options.items() if value is not None]
    if not given:
        raise UsageError(
            "quantize needs one of --bits, --memory and --at-least", 'such as --bits 4.5, or --at-least "30 tok/s"'
        )
    if len(given) > 1:
        raise UsageError(f"quantize takes one budget, not {' and '.join(given)}", "leave out all but one")
    if memory is not None:
        match = _SIZE.fullmatch(memory.strip())
        if match is None or float(match[1]) == 0:
            raise UsageError(f"--memory must be a size, not {memory!r:.80}", "such as 12GB, 800MB or 12GiB")
        return QuantizationBudget(memory_bytes=int(float(match[1]) * _UNITS[match[2].upper()]))
    if speed is not None:
        match = _SPEED.fullmatch(speed.strip())
        if match is None or float(match[1]) == 0:
            raise UsageError(f"--at-least must be a speed, not {speed!r:.80}", 'such as "30 tok/s"')
        return QuantizationBudget(tokens_per_second=float(match[1]))
    assert bits is not None
    if not 2 <= bits <= 9:
        raise UsageError(f"--bits must be from 2 to 9, not {bits:g}", "scales and biases count, too: 4 bits take 4.5")
    return QuantizationBudget(bits=bits)


def bytes_in_memory(shape: StepShape, target: TargetMachine, memory: int) -> int:
    """Return the bytes of weights that leave room for the program and the K/V of MEMORY_CONTEXT tokens."""
    context = min(MEMORY_CONTEXT, shape.context_length)
    return memory - shape.cost.kv_bytes(context) - working_memory(shape, on_gpu=target.apple)


def predicted_speed(shape: StepShape, target: TargetMachine, weight_bytes: int) -> tuple[float, bool]:
    """Return tok/s of a step that reads so many bytes of weights, and whether it is expected rather than a bound."""
    cost = shape.cost
    context = min(DEFAULT_CONTEXT, shape.context_length - 1)
    nbytes = weight_bytes + cost.kv_bytes_read(context) + cost.kv_bytes_written()
    least = step_limit(nbytes, cost.step_flops(context), target.bandwidth, target.flops).seconds
    seconds = step_seconds(shape, target, nbytes)
    if seconds is None:
        return 1 / least, False
    return 1 / max(seconds, least), True


def largest_that_holds(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the largest number of [low, high] for which `holds`, which is false from some number on; None if none."""
    if not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
