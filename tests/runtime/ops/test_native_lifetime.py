"""Graph nodes of the native kernels freed on MLX's stream thread while another thread waits for that stream."""

import subprocess
import sys

import pytest

from headrace.runtime.ops import native
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

# clear_cache waits for the stream with the interpreter lock held: a node that needed the lock to die would hang it.
_PROGRAM = """
import mlx.core as mx
from headrace.runtime.ops import Weight, native
weight = native.prepare(Weight(mx.random.normal((256, 256))), mx.float32)
norm, x = mx.ones((256,)), mx.random.normal((1, 1, 256))
for _ in range(300):
    y = x
    for _ in range(20):
        y = native.linear_add(native.norm_linear(y, norm, 1e-6, weight), weight, y)
    mx.async_eval(y)
    del y
    mx.clear_cache()
"""


def test_nodes_are_freed_without_the_interpreter_lock() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=PATIENCE_S)
