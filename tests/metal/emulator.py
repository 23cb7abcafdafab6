"""Launches of `headrace.runtime.ops.metal` on the CPU, from the Metal source that MLX generates.

MLX records a kernel without Metal while it traces an export, and prints the source. g++ compiles it with `shim.h`.
"""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from headrace.runtime.ops import metal, metal_check

AVAILABLE = shutil.which("g++") is not None and not mx.metal.is_available()
GOLDEN = Path(__file__).with_name("sources.metal")
_SHIM = Path(__file__).with_name("shim.h")
# Arguments of a kernel: `  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]`, a number of the thread, and
# `  const device float16_t* x [[buffer(0)]]`: type, name, place.
_ATTRIBUTE = re.compile(r"  uint3? (\w+) \[\[\w+\]\]")
_BUFFER = re.compile(r"  (?:const )?(?:device|constant) ([^*]+)\* (\w+) \[\[buffer\((\d+)\)\]\]")


def sources() -> str:
    """Return the Metal source of every kernel that `metal_check` compares in float16, as MLX generates it."""
    found = dict[str, str]()

    def launch(name: str, *arguments: Any, **options: Any) -> list[mx.array]:
        found.setdefault(name, generated(name, *arguments, **options))
        return [mx.zeros(*output) for output in arguments[2].values()]

    with patch.object(metal, "launch", launch):
        list(metal_check.pairs())
    return "\n".join(found.values())


@contextmanager
def emulated() -> Iterator[list[str]]:
    """Run the kernels on the CPU; yield the names of those that ran."""
    names = list[str]()

    def launch(name: str, *arguments: Any, **options: Any) -> list[mx.array]:
        names.append(name)
        return run(name, *arguments, **options)

    with patch.object(metal, "launch", launch), metal.forced(True):
        yield names


def generated(
    name: str,
    source: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, Any],
    *,
    strided: bool = False,
    **options: Any,
) -> str:
    """Return the Metal source of a launch, from MLX."""
    shapes, dtypes = zip(*outputs.values(), strict=True)
    kernel = metal.kernel_of(name, source, tuple(inputs), tuple(outputs), strided)

    def traced(*arrays: mx.array) -> list[mx.array]:
        found: list[mx.array] = kernel(
            inputs=list(arrays), output_shapes=list(shapes), output_dtypes=list(dtypes), verbose=True, **options
        )
        return found

    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+b") as printed:
        before = os.dup(1)
        os.dup2(printed.fileno(), 1)  # MLX prints in C++, past `sys.stdout`
        try:
            mx.export_function(str(Path(folder) / "kernel.mlxfn"), traced, *inputs.values())
        finally:
            os.dup2(before, 1)
            os.close(before)
        printed.seek(0)
        return printed.read().decode().split("```")[1].strip() + "\n"


def run(
    name: str,
    source: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, Any],
    *,
    strided: bool = False,
    **options: Any,
) -> list[mx.array]:
    """Run a launch, and return its outputs."""
    text = generated(name, source, inputs, outputs, strided=strided, **options)
    arrays = {key: _raw(array, strided) for key, array in inputs.items()}
    # Outputs begin as NaN, so that a value which is not written shows: 0xFFFF is NaN in float16 and in bfloat16.
    results = {
        key: np.full(shape, 0xFFFF, np.uint16) if dtype.size == 2 else np.full(shape, np.nan, np.float32)
        for key, (shape, dtype) in outputs.items()
    }
    places = arrays | results
    for key, array in arrays.items():
        places[f"{key}_shape"] = np.array(array.shape, np.int32)
        places[f"{key}_strides"] = np.array(array.strides, np.int64) // array.itemsize
    buffers = [places[match[2]] for match in _BUFFER.finditer(text)]
    pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
    grid, size = ((ctypes.c_uint32 * 3)(*options[key]) for key in ("grid", "threadgroup"))
    _compiled(text).run(pointers, grid, size)
    found = []
    for key, (_, dtype) in outputs.items():
        array = mx.array(results[key])
        found.append(array.view(dtype) if dtype.size == 2 else array)
    return found


def _raw(array: mx.array, strided: bool) -> np.ndarray[Any, Any]:
    """Return an array's memory; half-precision numbers as integers of 16 bits."""
    if array.dtype in (mx.float16, mx.bfloat16):
        array = array.view(mx.uint16)
    mx.eval(array)
    view = np.array(array, copy=False)
    return view if strided else np.ascontiguousarray(view)


@lru_cache(maxsize=256)
def _compiled(text: str) -> ctypes.CDLL:
    """Return the kernel as a library with a function `run`.

    The source ends with the instance of the kernel's template; `decltype(NAME<...>)` in it is the function to call.
    """
    body, _, instance = text.partition("\ntemplate [[host_name")
    called = re.search(r"decltype\((.+?)\) ", instance)
    assert called, "no template"
    arguments = [f"({kind}*)buffers[{place}]" for place, (kind, _, _) in enumerate(_BUFFER.findall(body))]
    arguments += [f"self->{attribute}" for attribute in _ATTRIBUTE.findall(body)]
    code = f"""#include "{_SHIM}"
{body}
static void** buffers;
static void kernel_of_thread() {{ {called[1]}({", ".join(arguments)}); }}
extern "C" void run(void** given, const uint* grid, const uint* size) {{ buffers = given; run_grid(grid, size); }}
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cpp"
        library = Path(folder) / "kernel.so"
        path.write_text(code)
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", path, "-o", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))
