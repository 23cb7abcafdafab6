"""Every set of operations that can run here, for tests to be parametrised over, and how exactly they compute."""

import mlx.core as mx

from runtime.ops import Ops, native, reference

KERNELS: list[Ops] = [reference, *([native] if native.status().available else [])]


def name_of(ops: Ops) -> str:
    return ops.name


def tolerance(ops: Ops) -> float:
    """Largest difference of float32 logits, relative to the largest logit, that rounding explains.

    Operations that store K/V in half precision keep 11 bits of them; a few layers multiply that error by about four.
    """
    return 1e-5 if ops.kv_dtype(mx.float32) == mx.float32 else 2e-3
