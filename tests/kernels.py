"""Every set of operations that can run here, for tests to be parametrised over, and how exactly they compute."""

from typing import Any

import mlx.core as mx

from runtime.ops import Ops, native, reference


class FullPrecisionKV:
    """The native kernels with K/V kept in float32: what remains is their own rounding."""

    name = "native-f32-kv"

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def kv_dtype(self, compute: mx.Dtype) -> mx.Dtype:
        return compute


_built = native.status().available
KERNELS: list[Ops] = [reference, *([native, FullPrecisionKV()] if _built else [])]
FAST: Ops = native if _built else reference


def name_of(ops: Ops) -> str:
    return ops.name


def tolerance(ops: Ops) -> float:
    """Largest difference of float32 logits, relative to the largest logit, that rounding explains.

    Operations that store K/V in half precision keep 11 bits of them; a few layers multiply that error by about four.
    """
    return 1e-5 if ops.kv_dtype(mx.float32) == mx.float32 else 2e-3
