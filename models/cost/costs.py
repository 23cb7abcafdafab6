"""Step cost and memory use of a checkpoint, before it is loaded.

`loading.load` and `loading.ranked` check with these whether a model fits; predictions and benchmarks show them. The
figures of a loaded network are `StepCost`s of its own, which `tests/models/cost/test_costs.py` compares with these.
"""

from math import prod

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.shard_header import FLOATS, stored_dtype
from headrace.models.checkpoint.text_part import text_part
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.cost.step_shape import StepShape
from headrace.runtime import ops
from headrace.runtime.engine.prompt_chunks import LARGEST
from headrace.runtime.errors import UnsupportedModelError
from headrace.runtime.machine import memory
from headrace.runtime.machine.hardware import machine
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops.attention import FUSED, SCORES

# Fitted to peaks (ru_maxrss) of Linux processes with models of 0.1 to 0.9 GB and chunks of 512 rows. No script refits
# them: `predicted_memory` of tests/soak/memory.py returns the prediction and the peak of a process.
# Bytes of Python, MLX, kernels and text libraries. A GPU's own libraries are a generous estimate, not measured.
_PROGRAM = {False: 42_000_000, True: 100_000_000}  # on a CPU, on a GPU
_TOKEN = 300  # bytes per vocabulary entry of a tokenizer
_PARSED = 100  # further bytes per entry while its file is parsed
_FLOAT = 4  # bytes
_SCORES = 96 << 20  # bytes of attention scores in stock MLX on a CPU
_SCORES_ON_GPU = 2 * SCORES[mx.DeviceType.gpu]  # the same on a GPU, for head sizes without a fused kernel


def working_memory(shape: StepShape, *, on_gpu: bool | None = None) -> int:
    """Return an upper bound on the bytes besides weights and K/V: the program, and the larger of chunk and loading.

    With E the hidden size, F the feed-forward size (0 if all of it is experts), H * D the width of all heads, V the
    vocabulary, A active experts of size X:

        program     _PROGRAM + _TOKEN * V
        chunk       _FLOAT * (4 E + 3 F + 3 H D + A (2 X + 1.25 E)) for each of its rows (`_row`, `LARGEST`)
        loading     LOADING_CACHE_LIMIT + _PARSED * V + a layer's gate and up twice (read, and stacked), or a stack of
                    experts (`_loading`)

    A chunk's rows are the residual stream in and out of a pass and of the next, gate and up with the rounded copies
    of the kernels, queries and heads; kernel scratch adds a quarter. A GPU also caches freed memory during prefill, up
    to a bound. Stock MLX on a CPU adds attention scores, on a GPU where head sizes have no fused kernel.

    on_gpu: None for this machine's device.
    """
    if on_gpu is None:
        on_gpu = machine().backend != "cpu"
    head = next((matrix for matrix in shape.matrices if matrix.output), None)
    vocabulary = 0
    hidden = 0
    if head is not None:
        vocabulary = head.rows
        hidden = head.columns
    working = 0
    if on_gpu:
        working = memory.CACHE_LIMIT
        if shape.head_dim not in FUSED:
            working += _SCORES_ON_GPU
    elif _is_stock(shape):
        working = _SCORES
    rows = LARGEST[mx.DeviceType.gpu if on_gpu else mx.DeviceType.cpu]  # of the largest chunk
    peak = max(_FLOAT * rows * _row(shape, hidden), _loading(shape) + _PARSED * vocabulary)
    return _PROGRAM[on_gpu] + _TOKEN * vocabulary + peak + working


def loaded_weight_bytes(checkpoint: Checkpoint, shape: StepShape) -> int:
    """Return the bytes of the loaded weights.

    Stock MLX converts floats to its compute type, float32 on a CPU, which doubles half precision. The native kernels
    keep the stored types.
    """
    part = text_part(checkpoint)
    if not _is_stock(shape):
        return part.nbytes
    from headrace.models.network.dtypes import compute_dtype

    dtype = compute_dtype(mx.default_device().type, stored_dtype(part.tensors), checkpoint.config)
    return sum(prod(info.shape) * dtype.size if info.dtype in FLOATS else info.nbytes for info in part.tensors.values())


def _row(shape: StepShape, hidden: int) -> int:
    """Return the floats per row of a chunk."""
    heads = shape.heads * shape.head_dim
    dense = [matrix for matrix in shape.matrices if not matrix.output and matrix.share == 1]
    widest = max((max(matrix.rows, matrix.columns) for matrix in dense), default=0)
    inner = 0
    if widest > max(hidden, heads):  # otherwise it belongs to attention or the router
        inner = widest
    experts = [matrix for matrix in shape.matrices if matrix.share < 1]
    # A layer's values of a token: experts' inner values, and the copies of its row that experts get
    routed = max((round(m.share * m.count / _layers(shape)) * min(m.rows, m.columns) for m in experts), default=0)
    active = max((round(m.share * m.count / _layers(shape)) for m in experts), default=0)
    return 4 * hidden + 3 * inner + 3 * heads + 2 * routed + active * hidden * 5 // 4


def _loading(shape: StepShape) -> int:
    """Return the temporary bytes of reading a layer's largest weights."""
    layers = [matrix for matrix in shape.matrices if not matrix.output]
    stacks = max((m.nbytes * m.count // _layers(shape) for m in layers if m.share < 1), default=0)
    dense = max((matrix.nbytes for matrix in layers if matrix.share == 1), default=0)
    return memory.LOADING_CACHE_LIMIT + max(stacks, 4 * dense)  # dense: gate and up, each read and stacked


def _layers(shape: StepShape) -> int:
    """Return the number of layers, at least 1, to divide by."""
    return max(1, shape.layers)


def _is_stock(shape: StepShape) -> bool:
    """Return whether stock MLX runs the model on a CPU."""
    return shape.stock or ops.select() is not ops.native


def checkpoint_cost(checkpoint: Checkpoint) -> StepCost | None:
    """Return the step cost from headers, with K/V in half precision; None for unknown matrix names."""
    try:
        return shape_of_checkpoint(checkpoint).cost
    except UnsupportedModelError:
        return None


def shape_to_run(checkpoint: Checkpoint, decoder: DecoderConfig | None = None) -> StepShape:
    """Return the shape from headers, or from mlx-lm's class for unknown matrix names. Raises what making it raises.

    decoder: as for `shape_of_checkpoint`.
    """
    try:
        return shape_of_checkpoint(checkpoint, decoder)
    except UnsupportedModelError:
        from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_checkpoint

        return shape_of_mlx_lm_checkpoint(checkpoint)
