"""Memory of native weights: no overhead, and reuse after they are freed."""

import subprocess
import sys

import pytest

from headrace.runtime.ops import native
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

# Layers of a llama of a billion weights: large matrices, and scales that have to fit between them.
_PROGRAM = """
import mlx.core as mx
from headrace.runtime.ops import Weight, native

def layer():
    kept = []
    for rows, columns in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)):
        packed = mx.ones((rows, columns // 8), mx.uint32)
        scales = mx.ones((rows, columns // 64), mx.float16)
        kept.append(native.prepare(Weight(packed, scales, scales, 4, 64), mx.float32))
    return kept

layers = [layer() for _ in range(4)]
held = mx.get_active_memory()
weights = sum(weight.nbytes for layer in layers for weight in layer)
room = 1.1 * weights + 40e6  # the last slab is not full
assert weights < held < room, (held, weights)
del layers
layers = [layer() for _ in range(4)]
assert mx.get_active_memory() < room, (mx.get_active_memory(), weights)
"""


def test_slabs_are_filled_and_used_again() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=PATIENCE_S)
