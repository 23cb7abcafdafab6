"""Every set of operations that can run here, for tests to be parametrised over, and how exactly they compute."""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from headrace.runtime.ops import Ops, Weight, native, reference
from headrace.runtime.ops.kv_format import FLOAT32, KVFormat, plain


class Exact:
    """The native kernels as HEADRACE_EXACT=1 has them: float32 throughout, so only the order of additions differs."""

    name = "native-exact"

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def prepare(self, weight: Weight, dtype: mx.Dtype) -> Weight:
        with patch.dict(os.environ, HEADRACE_EXACT="1"):
            return native.prepare(weight, dtype)

    def kv_format(self, compute: mx.Dtype) -> KVFormat:
        return plain(compute)


_built = native.status().available
KERNELS: list[Ops] = [reference, *([native, Exact()] if _built else [])]
FAST: Ops = native if _built else reference
INSTRUCTION_SETS = ["avx512", "avx2", "neon", "portable"]


def on_instruction_set(name: str) -> Iterator[str]:
    """For a fixture: the kernels of this set, or a skip; afterwards what was in use before."""
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
    """Largest difference of float32 logits, relative to the largest logit, that rounding explains.

    Operations that store K/V in half precision keep 11 bits of them, and of activations 16; a few layers multiply that
    error by about four.
    """
    return 1e-5 if ops.kv_format(mx.float32) == FLOAT32 else 2e-3
