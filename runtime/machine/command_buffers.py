"""Kernels of a Metal command buffer, limited before MLX makes its device.

A step is encoded while the one before runs. MLX copies a layer's K/V buffers whole if they are written while a command
buffer that reads them is unfinished. Ten command buffers may be in flight, so that none of the step before reads a
layer's K/V any more where the ten hold less than a step. MLX's own limit, 40 or 50 kernels, is too high for models of
few layers. The limit is computed, not measured (`tests.bench.metal_simulator`).

`machine()` and loading call it before MLX makes its device; afterwards MLX does not read the variable again.

Guard: tests/runtime/machine/test_command_buffers.py.
"""

import os
import sys

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
_MOST = 40  # MLX's limit on most chips
_LEAST = 8  # bounds the number of submissions
_LAYER = 11  # kernels of a layer, at least
_UNKNOWN = 16  # layers of a model that is not known yet
_BUFFERS = 12  # ten in flight, the open one, and one more


def kernels_per_buffer(layers: int) -> int:
    """Return the kernels of a command buffer for a model of so many layers."""
    return max(_LEAST, min(_MOST, layers * _LAYER // _BUFFERS))


def limit_command_buffers(layers: int = _UNKNOWN) -> None:
    """Set MLX's environment variable on a Mac, unless it is set. Does nothing once MLX has made its device.

    Asking MLX about its device makes it (`runtime.machine.hardware`). Without a model the limit is one for few layers.
    """
    if sys.platform == "darwin":
        os.environ.setdefault(VARIABLE, str(kernels_per_buffer(layers)))
