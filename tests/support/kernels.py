"""Operations available here, for parametrized tests, and their precision."""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from headrace.runtime.ops import Ops, Weight, native, reference
from headrace.runtime.ops.kv_format import FLOAT32, KVFormat, plain


class Exact:
    """The native kernels with HEADRACE_EXACT=1: float32 throughout, so only the order of additions differs."""

    name = "native-exact"

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def prepare(self, weight: Weight, dtype: mx.Dtype, *, exact: bool = True) -> Weight:  # noqa: ARG002
        with patch.dict(os.environ, HEADRACE_EXACT="1"):
            return native.prepare(weight, dtype)

    def kv_format(self, compute: mx.Dtype) -> KVFormat:
        return plain(compute)


_built = native.status().available
KERNELS: list[Ops] = [reference, *([native, Exact()] if _built else [])]
FAST: Ops = native if _built else reference
INSTRUCTION_SETS = ["avx512", "avx2", "neon", "portable"]


def on_instruction_set(name: str) -> Iterator[str]:
    """Use the kernels of one instruction set in a fixture, or skip; restore the previous ones afterwards."""
    before = native.status()
    assert before.instruction_set is not None
    if not native.use_instruction_set(name):
        pytest.skip(f"this processor has no {name}")
    yield name
    native.use_instruction_set(before.instruction_set)
    native.set_threads(before.threads or 0)


def name_of(ops: Ops) -> str:
    return ops.name


def tolerance(ops: Ops) -> float:
    """Return the rounding tolerance of float32 logits, relative to the largest logit.

    Half-precision K/V keep 11 bits, rounded activations 16; a few layers multiply that error by about four.
    """
    return 1e-5 if ops.kv_format(mx.float32) == FLOAT32 else 2e-3
