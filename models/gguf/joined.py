"""Two tensors of a GGUF as one, where the network has one matrix for both."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from headrace.models.gguf.container import RawTensor


def matrix_of(stack: RawTensor, index: int) -> RawTensor:
    """Return one matrix of a stack."""
    rows = stack.data.shape[0] // stack.shape[0]
    return RawTensor(stack.name, stack.type, stack.shape[1:], stack.data[index * rows : (index + 1) * rows])


def joined(above: RawTensor, below: RawTensor) -> tuple[RawTensor, float]:
    """Return (one matrix of the rows of two, the error of that). Two types become 8-bit blocks."""
    shape = (above.shape[0] + below.shape[0], *above.shape[1:])
    if above.type == below.type:
        return RawTensor(above.name, above.type, shape, np.concatenate([above.data, below.data])), 0.0
    values = np.concatenate([dequantize(part.data, GGMLQuantizationType[part.type]) for part in (above, below)])
    blocks = quantize(values, GGMLQuantizationType.Q8_0)
    error = float(np.abs(dequantize(blocks, GGMLQuantizationType.Q8_0) - values).max())
    return RawTensor(above.name, "Q8_0", shape, blocks), error
