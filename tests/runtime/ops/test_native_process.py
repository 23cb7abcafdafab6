"""Native kernels at process exit, in child processes and with several threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.runtime.ops import native
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

_WORK = """
import multiprocessing, sys, threading
import mlx.core as mx
from headrace.runtime.ops import Weight, native

def chain(steps=50):
    weight = native.prepare(Weight(mx.full((512, 512), 1 / 512)), mx.float32)
    x = mx.ones((1, 1, 512))
    for _ in range(steps):
        x = native.linear(x, weight)
    return x

def total(steps=50):
    return round(chain(steps).sum().item())

def child():
    sys.exit(0 if total() == 512 else 1)
"""


def _run(program: str) -> None:
    subprocess.run([sys.executable, "-c", _WORK + program], check=True, timeout=PATIENCE_S)


def test_the_process_exits_while_kernels_run() -> None:
    _run("mx.async_eval(chain(20_000))")


def test_a_weight_without_columns_causes_no_division_by_zero() -> None:
    _run("""
weight = native.prepare(Weight(mx.zeros((8, 0))), mx.float32)
assert mx.array_equal(native.linear(mx.zeros((1, 1, 0)), weight), mx.zeros((1, 1, 8)))
""")


# Shapes that once read or wrote out of bounds: in a process of their own.
_MISSHAPEN = """
kernels, zeros = native.kernels, lambda *shape: mx.zeros(shape)
wide = kernels.Matrix(zeros(4, 16), None, None, None, 0, 0)
for call in (
    lambda: kernels.rms_norm(zeros(2, 16), zeros(0, 16), 1e-5),
    lambda: kernels.rms_norm(zeros(2, 16), zeros(3, 16), 1e-5),
    lambda: kernels.linear(zeros(1, 16), wide, zeros(0, 16), 1e-5),
    lambda: kernels.layers(zeros(1, 1, 16), [zeros(1, 1, 128, 16)], [zeros(1, 1, 128, 16)], 0, [None]),
    lambda: kernels.slab([-1, 2, 2, 2, 128, 16], mx.float16),
    lambda: kernels.slab([2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 128, 16], mx.float16),
    lambda: kernels.grow(zeros(1, 2, 0, 16), 2**31 - 1),
    lambda: kernels.AttentionPlan(2**30, 2**30, 2**30, 1.0, None, None, None, 0.0, None, None),
):
    try:
        mx.eval(call())
    except ValueError:
        continue
    sys.exit(f"accepted: line {call.__code__.co_firstlineno}")
"""


def test_bindings_refuse_shapes_that_would_leave_their_buffers() -> None:
    _run(_MISSHAPEN)


def test_an_exception_while_kernels_run_ends_the_process() -> None:
    program = "mx.async_eval(chain(5_000)); raise RuntimeError('on purpose')"
    done = subprocess.run([sys.executable, "-c", _WORK + program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "on purpose" in done.stderr


def test_two_engines_in_one_process_share_the_pool() -> None:
    _run("""
results = []
def engine():
    results.append([total(200) for _ in range(20)])
threads = [threading.Thread(target=engine) for _ in range(2)]
for t in threads: t.start()
for t in threads: t.join()
assert results == [[512] * 20] * 2, results
""")


def test_a_spawned_child_computes(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        _WORK
        + """
if __name__ == "__main__":
    assert total() == 512
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join(600)
    assert process.exitcode == 0, process.exitcode
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, str(script)], check=True, timeout=PATIENCE_S, env=environment)


def test_the_number_of_threads_can_change() -> None:
    before = native.status().threads
    native.set_threads(1)
    assert native.status().threads == 1
    native.set_threads(0)
    assert native.status().threads == before
