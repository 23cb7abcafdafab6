"""What a checkpoint's step costs, before anything is loaded, and what memory there has to be beside the weights."""

from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.runtime.cost import StepCost
from headrace.runtime.errors import UnsupportedModelError
from headrace.runtime.machine import memory

WORKING_MEMORY = 150 << 20  # besides weights and KV cache: activations of a prefill chunk, the program itself


def working_memory(*, on_gpu: bool) -> int:
    """Bytes besides weights and KV cache, at most.

    A GPU's chunks are larger: what they free is kept, up to a bound, until the prompt is read. A buffer of K/V that
    grows takes that room while it is copied, not more.
    """
    return WORKING_MEMORY + (memory.POOL if on_gpu else 0)


def checkpoint_cost(checkpoint: Checkpoint) -> StepCost | None:
    """The cost of a step from headers alone, K/V in half precision. None where the matrices are not known by name."""
    try:
        return shape_of_checkpoint(checkpoint).cost
    except UnsupportedModelError:
        return None
